"""A fleet of servers behind SGLang's router."""

from aprilsched.engines.sglang.router.fleet import SGLangRouterFleet

__all__ = ["SGLangRouterFleet"]
