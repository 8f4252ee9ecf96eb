"""Fetches images by URL, from the public internet only.

Owns every socket that a client's URL can open. Knows no pictures and no limits of theirs but their
bytes. Invariant: no connection is made to an address that was not checked. The check stands where
sockets are opened, over what a name resolved to, and the connection goes to that address and not
to the name: so it holds for every redirect, and a name that changes its mind changes nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

import httpcore

from serving.errors import UnsupportedParameter
from workers.errors import ConfigError, InvalidRequest

SCHEMES = ("http", "https")
MAX_URL = 8192
MAX_REDIRECTS = 20
# Fetches of one process at a time.
MAX_FETCHES = 32
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = [("accept", "image/*"), ("accept-encoding", "identity"), ("user-agent", "specserve")]

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
# The prefix under which a gateway reaches IPv4 addresses.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# What the standard library of every supported Python does not count as private: a gateway's own
# prefix, site-local addresses, and the old way of writing IPv4 addresses.
_LOCAL = tuple(map(ipaddress.IPv6Network, ("64:ff9b:1::/48", "fec0::/10", "::/96")))


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """What may be fetched."""

    # Off: only `data:` URLs.
    enabled: bool = False
    # Of one image, redirects included.
    timeout_s: float = 10.0
    max_redirects: int = 3
    # Exact names, or `.suffix` for all names below; none = any public host.
    allowed_hosts: tuple[str, ...] = ()
    # Also private, loopback and link-local addresses: whoever can send a request can then make
    # this server ask any service it reaches. For an image store inside the cluster, together with
    # `allowed_hosts`.
    private_addresses: bool = False

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 < self.timeout_s <= 3600:
            raise ConfigError("ingress.fetch.timeout_s", self.timeout_s, "must be in (0, 3600]")
        if not 0 <= self.max_redirects <= MAX_REDIRECTS:
            raise ConfigError(
                "ingress.fetch.max_redirects",
                self.max_redirects,
                f"must be in [0, {MAX_REDIRECTS}]",
            )

    def allows_host(self, host: str) -> bool:
        """Whether a host's name is among those that are allowed."""
        name = host.rstrip(".").lower()
        return not self.allowed_hosts or any(
            name == allowed or (allowed.startswith(".") and name.endswith(allowed))
            for allowed in map(str.lower, self.allowed_hosts)
        )


class _Refused(Exception):
    """The URL is not fetched, and why."""


def is_public(address: Address) -> bool:
    """Whether an address is one that everybody may reach; also by what it stands for."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address.teredo is not None or any(address in network for network in _LOCAL):
            return False
    return address.is_global and not address.is_multicast


class _GuardedBackend(httpcore.AsyncNetworkBackend):
    """Opens connections to checked addresses only."""

    def __init__(self, private_addresses: bool) -> None:
        self._private_addresses = private_addresses
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's interface
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Resolve, check all, connect to the first that answers."""
        addresses = await _resolve(host, port)
        if not self._private_addresses and not all(map(is_public, addresses)):
            raise _Refused("its host resolves to an address that is not public")
        for number, address in enumerate(addresses, 1):
            try:
                return await self._backend.connect_tcp(
                    str(address), port, timeout, local_address, socket_options
                )
            except httpcore.NetworkError:
                if number == len(addresses):
                    raise
        raise _Refused("its host has no address")


async def _resolve(host: str, port: int) -> list[Address]:
    """Return what a name stands for, as the system resolves it; each address once."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _Refused("its host does not resolve") from error
    # A zone (fe80::1%eth0) is no part of what an address is.
    texts = (str(address[0]).partition("%")[0] for *_, address in found)
    return [ipaddress.ip_address(text) for text in dict.fromkeys(texts)]


class ImageFetcher:
    """Fetches what a client's URLs name, within the limits."""

    def __init__(self, limits: FetchLimits, max_bytes: int) -> None:
        """Prepare; nothing is opened before the first fetch.

        Args:
            limits: What may be fetched.
            max_bytes: Of one image.
        """
        self._limits = limits
        self._max_bytes = max_bytes
        self._pool = httpcore.AsyncConnectionPool(
            max_connections=MAX_FETCHES,
            # A kept connection would skip the check of the name that leads to it.
            max_keepalive_connections=0,
            network_backend=_GuardedBackend(limits.private_addresses),
        )
        self._slots = asyncio.Semaphore(MAX_FETCHES)

    async def fetch(self, url: str, param: str) -> bytes:
        """Return the bytes behind a URL.

        Args:
            url: What the client sent.
            param: Where it stands, for errors.

        Raises:
            UnsupportedParameter: URLs are not fetched here.
            InvalidRequest: This one is not fetched, or what came is no answer within the limits.
        """
        if not self._limits.enabled:
            raise UnsupportedParameter(
                f"{param}: only data: URLs are accepted (data:image/png;base64,...); the setting "
                "ingress.fetch.enabled allows http and https",
                param,
            )
        try:
            async with asyncio.timeout(self._limits.timeout_s), self._slots:
                return await self._follow(url)
        except TimeoutError as error:
            reason = f"no answer in {self._limits.timeout_s:g} s"
            raise InvalidRequest(f"{param}: the image was not fetched: {reason}", param) from error
        except _Refused as error:
            raise InvalidRequest(f"{param}: the image was not fetched: {error}", param) from error
        except (httpcore.NetworkError, httpcore.TimeoutException, ssl.SSLError) as error:
            reason = "its host cannot be reached"
            raise InvalidRequest(f"{param}: the image was not fetched: {reason}", param) from error
        except (httpcore.ProtocolError, httpcore.UnsupportedProtocol, ValueError) as error:
            reason = "its host does not speak HTTP"
            raise InvalidRequest(f"{param}: the image was not fetched: {reason}", param) from error

    async def aclose(self) -> None:
        """Close every connection."""
        await self._pool.aclose()

    async def _follow(self, url: str) -> bytes:
        was_secure = False
        for _ in range(self._limits.max_redirects + 1):
            parts = self._checked(url, was_secure)
            was_secure = parts.scheme == "https"
            async with self._pool.stream("GET", parts.geturl(), headers=_HEADERS) as response:
                headers = {key.lower().decode("latin-1"): value for key, value in response.headers}
                if response.status not in _REDIRECTS:
                    return await self._read(response, headers)
            location = headers.get("location")
            if location is None:
                raise _Refused("a redirect leads nowhere")
            try:
                url = urljoin(url, location.decode("latin-1"))
            except ValueError as error:
                raise _Refused("a redirect leads to no URL") from error
        raise _Refused(f"more than {self._limits.max_redirects} redirects")

    def _checked(self, url: str, was_secure: bool) -> SplitResult:
        """Return the parts of a URL that may be asked for."""
        if len(url) > MAX_URL:
            raise _Refused(f"the URL has more than {MAX_URL} characters")
        try:
            parts = urlsplit(url)
            _ = parts.port  # raises for what is no port
        except ValueError as error:
            raise _Refused("it is no URL") from error
        if parts.scheme.lower() not in SCHEMES or not parts.hostname:
            raise _Refused("only http and https URLs are fetched")
        if parts.username is not None or parts.password is not None:
            raise _Refused("a URL must hold no user name")
        if was_secure and parts.scheme != "https":
            raise _Refused("a redirect leads from https to http")
        if not self._limits.allows_host(parts.hostname):
            raise _Refused("its host is not among ingress.fetch.allowed_hosts")
        return parts._replace(fragment="")

    async def _read(self, response: httpcore.Response, headers: dict[str, bytes]) -> bytes:
        if response.status != 200:
            raise _Refused(f"its host answered {response.status}")
        if headers.get("content-encoding", b"identity").lower() != b"identity":
            raise _Refused("its host sent it compressed")
        too_large = _Refused(f"it has more than {self._max_bytes} bytes")
        length = headers.get("content-length", b"")
        if length.isdigit() and int(length) > self._max_bytes:
            raise too_large
        chunks: list[bytes] = []
        num_bytes = 0
        async for chunk in response.aiter_stream():
            num_bytes += len(chunk)
            if num_bytes > self._max_bytes:
                raise too_large
            chunks.append(chunk)
        return b"".join(chunks)
