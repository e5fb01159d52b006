"""What leaves this host in plain text: refused at start, unless the configuration trusts the network."""

from __future__ import annotations

from collections.abc import Mapping

from meshkit.address import is_local
from meshkit.config import ServiceConfig
from meshkit.errors import InvalidArgument
from meshkit.telemetry.logging import get_logger
from meshkit.telemetry.metrics import Metrics

log = get_logger(__name__)


def check_exposure(config: ServiceConfig, addresses: Mapping[str, str], *, metrics: Metrics) -> None:
    """Check the addresses that a service listens at for others, or calls them at, by their fields.

    A network that is trusted by configuration is seen: as a warning in the log and as a metric.

    Raises:
        InvalidArgument: one of them is beyond this host, and nothing protects what is sent.
    """
    trusted = config.insecure_network and config.tls is None
    metrics.gauge(
        "insecure_network", "1 where services speak in plain text over a network that is trusted"
    ).set(trusted)
    if config.tls is not None:
        return
    exposed = {field: address for field, address in addresses.items() if not is_local(address)}
    if trusted:
        log.warning("insecure_network: whoever is on this network may read and command the mesh", **exposed)
        return
    for field, address in exposed.items():
        require_protection(config, address, field=field)


def require_protection(config: ServiceConfig, address: str, *, field: str) -> None:
    """Raises InvalidArgument where what is sent to or from `address` would leave this host in plain text."""
    if config.tls is None and not config.insecure_network and not is_local(address):
        raise InvalidArgument(
            f"{field} is {address!r}, beyond this host, and services would speak in plain text: set tls to "
            "certificate, key and authority (`chipmesh certs create` makes them), or insecure_network to "
            "true where everything on that network may be trusted",
            field=field,
            reason="PLAIN_TEXT",
        )
