"""How often the kernel has killed for want of memory."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path


def oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes the kernel has killed for memory: in our cgroup, else on the host."""
    for path in (*_cgroup_counters(root), root / "proc/vmstat"):
        with contextlib.suppress(OSError):
            if found := re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE):
                return int(found[1])
    return 0


def _cgroup_counters(root: Path) -> list[Path]:
    """Return where our cgroup's counter may lie, v1 and v2; inside a container the cgroup is mounted as the root."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    paths = []
    for line in lines:
        _, controllers, cgroup = line.split(":", 2)
        if "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.oom_control"
        elif not controllers:
            mount, name = root / "sys/fs/cgroup", "memory.events"
        else:
            continue
        paths += [mount / cgroup.lstrip("/") / name, mount / name]
    return paths
