"""Which devices a process was started with: by variables that a vendor's runtime reads once. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshkit.errors import FailedPrecondition
from meshkit.telemetry.logging import get_logger

log = get_logger(__name__)


@dataclass
class Visibility:
    """`names`: the variables, such as ACME_VISIBLE_DEVICES. `in_effect`: ids as the runtime read them; None:
    all. `environment`: the process's, looked at again at each call.
    """

    names: Sequence[str]
    in_effect: str | None
    environment: Mapping[str, str]
    _told: bool = field(default=False, repr=False)

    def warn_if_changed(self) -> None:
        """Log once that a variable was changed after the runtime had read it: without effect."""
        changed = [name for name in self.names if self.environment.get(name) != self.in_effect]
        if changed and not self._told:
            self._told = True
            log.warning(
                "visibility changed after the runtime was loaded; it has no effect until a restart",
                variables=changed,
                in_effect=self.in_effect or "all",
            )

    def require_seen(self, count: int, *, listed_by: str) -> None:
        """A runtime ends its list at the first name that it does not know: who named more is told.

        count: devices that the runtime sees. listed_by: the vendor's command that lists them.

        Raises:
            FailedPrecondition: other devices were named.
        """
        if self.in_effect is None or (named := len(self.in_effect.split(","))) == count:
            return
        variables = " and ".join(self.names) + (" name" if len(self.names) > 1 else " names")
        raise FailedPrecondition(
            f"{variables} {named} devices ({self.in_effect}), but the runtime sees {count}; "
            f"name devices that {listed_by} lists",
            field="backend",
            reason="VISIBILITY",
        )


def count_device_files(stem: str, visible: str | None, *, root: Path = Path("/")) -> int | None:
    """Devices that the driver has for this process, by its files /dev/STEM0, /dev/STEM1 and so on; of ids in
    `visible` those that are there. None: names are given that files do not tell, such as UUIDs.

    root: another one than / only in tests.
    """
    files = (root / "dev").glob(f"{stem}[0-9]*")
    count = sum(path.name.removeprefix(stem).isdigit() for path in files)
    if visible is None:
        return count
    named = [part.strip() for part in visible.split(",")]
    if not all(part.isdigit() for part in named):
        return None
    return sum(int(part) < count for part in named)
