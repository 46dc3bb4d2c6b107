"""The control groups of Linux that this process is in, whose limits count beside the machine's."""

from collections.abc import Iterator
from pathlib import Path


def control_groups(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """Return the folders of the groups of this process and of those around them, with the version of each.

    In a container the path may be one that only the host can see. The outermost folder is then the container's own.
    `root` is for tests.
    """
    memberships = root / "proc/self/cgroup"
    mounted = root / "sys/fs/cgroup"
    lines = memberships.read_text().splitlines() if memberships.exists() else ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, version = mounted, 2
        elif controller in controllers.split(","):
            top, version = mounted / controller, 1
        else:
            continue
        folder = top / path.lstrip("/")
        yield folder, version
        while folder != top and top in folder.parents:
            folder = folder.parent
            yield folder, version
