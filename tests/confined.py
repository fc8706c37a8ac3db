"""Running a command with a small or read-only disk, or without a network: really, in namespaces of the kernel's."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# A new network namespace has a loopback that is down; a notebook's kernel and its client talk over it.
_LOOPBACK_UP = """
import fcntl, socket, struct
with socket.socket() as s:
    flags = struct.unpack("16sh", fcntl.ioctl(s, 0x8913, struct.pack("16sh", b"lo", 0)))[1]
    fcntl.ioctl(s, 0x8914, struct.pack("16sh", b"lo", flags | 1))
"""


def run(
    command: list[str], *, disk: Path | None = None, size: str = "1m", read_only: bool = False, network: bool = True,
    after: str = "", **options,
) -> subprocess.CompletedProcess[str]:
    """Run a command in namespaces of its own.

    Parameters
    ----------
    command : list of str
        What to run.
    disk : Path, optional
        A folder that becomes a disk of its own.
    size : str
        Of that disk.
    read_only : bool
        Whether it cannot be written.
    network : bool
        Whether there is any beside the loopback.
    after : str
        Shell commands after it, inside.
    **options
        For `subprocess.run`.
    """
    unshare = ["unshare", "--mount", *([] if network else ["--net"]), *(["--map-root-user"] if os.geteuid() else [])]
    require(unshare)
    steps = ["set -e"]
    if disk is not None:
        steps.append(f"mount -t tmpfs -o size={size} none '{disk}'")
    if not network:
        steps.append(f"'{sys.executable}' -c '{_LOOPBACK_UP}'")
    if read_only:
        steps.append(f"mount -o remount,ro '{disk}'")
    steps += ["set +e", '"$@"', "status=$?", after, "exit $status"]
    script = "\n".join(steps)
    return subprocess.run(
        [*unshare, "sh", "-c", script, "sh", *command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=300, **options,
    )


def require(unshare: list[str]) -> None:
    """Fail, and say why, where namespaces are not allowed: a check that did not run must not look like a success."""
    if shutil.which("unshare") is None:
        pytest.fail("nothing was tested: no `unshare` here (Debian: util-linux); this test needs Linux")
    tried = subprocess.run([*unshare, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.fail(
            f"nothing was tested: `{' '.join(unshare)}` is not allowed here ({tried.stderr.strip()}): run as root, or "
            "allow user namespaces (Ubuntu: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0)"
        )
