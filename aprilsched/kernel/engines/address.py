"""The address of a server, and its name in segments, events and errors."""

from __future__ import annotations

from dataclasses import dataclass

from yarl import URL

from aprilsched.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerAddress:
    """A server's base URL; two spellings of one address are equal."""

    url: URL

    @classmethod
    def parse(cls, text: str) -> ServerAddress:
        """Parse the address in `text`.

        Raises:
            ConfigError: if it is not an http(s) URL of a host without user, query or fragment.
        """
        try:
            url = URL(text.strip())
            usable = url.scheme in ("http", "https") and bool(url.host) and url.port is not None
        except (ValueError, TypeError, AttributeError):
            raise ConfigError(
                f"{text!r} is not a URL; give one like http://10.0.0.1:30000."
            ) from None
        if url.user is not None or url.password is not None:
            # The message does not repeat the URL, because it may hold a password.
            raise ConfigError("A server's URL holds a user or password; use api_key instead.")
        if not usable or url.query_string or url.fragment:
            raise ConfigError(
                f"{text!r} is not a server's URL; give one like http://10.0.0.1:30000."
            )
        return cls(url=url.with_path(url.path.rstrip("/") or "/"))

    @property
    def name(self) -> str:
        """``host:port``, followed by the path where several servers share a host and port."""
        host = f"[{self.url.host}]" if ":" in (self.url.host or "") else self.url.host
        return f"{host}:{self.url.port}{self.url.path.rstrip('/')}"
