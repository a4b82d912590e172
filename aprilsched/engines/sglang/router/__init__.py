"""A fleet of servers behind SGLang's router."""

from aprilsched.engines.sglang.router.router_fleet import SGLangRouterFleet

__all__ = ["SGLangRouterFleet"]
