"""Fetches the Python interface files of the flash-attn distributions, without their kernels.

Owns the pinned versions and hashes. The wheels are hundreds of megabytes of kernels around a few
kilobytes of Python, so pip's own lazy wheel reads only those few from the index pip is configured
for; where the index has no range requests, pip downloads the wheel once. Nothing of the
distributions is kept in the repository: files live in `.cache/` and are checked on every use.

Run by the tests as `python -m tests.workers.attention.fetch_interfaces`, in a process of its own
because pip's internals are no library. Invariant: a returned directory holds exactly the pinned
bytes.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

CACHE = Path(__file__).parents[3] / ".cache" / "flash_attn_interfaces"

# The wheels exist for Linux only; any machine may read their Python.
WHEEL_FOR = (
    "--no-deps",
    "--only-binary=:all:",
    "--python-version=3.12",
    "--platform=manylinux1_x86_64",
    "--platform=manylinux_2_28_x86_64",
)


@dataclass(frozen=True, slots=True)
class Interface:
    """A pinned distribution and the files wanted of it, with their SHA-256."""

    package: str
    version: str
    files: Mapping[str, str]

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def directory(self) -> Path:
        """What to put on the import path."""
        return CACHE / f"{self.package}-{self.version}"

    def is_cached(self) -> bool:
        return all(
            (self.directory / name).is_file()
            and _sha256((self.directory / name).read_bytes()) == digest
            for name, digest in self.files.items()
        )


STANDALONE = Interface(
    "vllm-flash-attn",
    "2.6.2",
    {
        "vllm_flash_attn/__init__.py": (
            "fbebc11c2718fd7b49083e0d145f630b8ae50e08d8f9165666caf1dc2410be9f"
        ),
        "vllm_flash_attn/flash_attn_interface.py": (
            "a5d1451e4dd8ea92ebe441296cb465e106a734faa386c819342cca5170047370"
        ),
    },
)
VLLM_COPY = Interface(
    "vllm",
    "0.32.0",
    {
        "vllm/vllm_flash_attn/__init__.py": (
            "68d256feb9db6c1c397dc1458f6b42e2bbdc66429ae14d6a2d41c27ef0dbd878"
        ),
        "vllm/vllm_flash_attn/flash_attn_interface.py": (
            "adea0bc66605b44f9d9f23e298535899f4d0f68323d95261ab088035c881ddc9"
        ),
    },
)
INTERFACES = (STANDALONE, VLLM_COPY)


def fetch(interface: Interface) -> None:
    """Fill the interface's directory.

    Raises:
        ValueError: A fetched file is not the pinned one.
    """
    try:
        contents = _read_ranges(interface)
    except Exception as error:  # noqa: BLE001, pip's internals change; its command line does not
        print(f"{interface.requirement}: no partial read ({error!r}), downloading the wheel")
        contents = _download(interface)
    for name, digest in interface.files.items():
        if _sha256(contents[name]) != digest:
            raise ValueError(f"{interface.requirement}: {name} has {_sha256(contents[name])}")
    for name, content in contents.items():
        path = interface.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _read_ranges(interface: Interface) -> dict[str, bytes]:
    """Read the files out of the wheel where it lies, through pip's session and configuration."""
    from pip._internal.cli.cmdoptions import make_target_python
    from pip._internal.commands import create_command
    from pip._internal.network.lazy_wheel import LazyZipOverHTTP

    command = create_command("download")
    options, _ = command.parse_args([*WHEEL_FOR, "--quiet", interface.requirement])
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(
            options, session, target_python=make_target_python(options)
        )
        candidates = finder.find_all_candidates(interface.package)
        wanted = [c for c in candidates if str(c.version) == interface.version]
        with LazyZipOverHTTP(wanted[0].link.url_without_fragment, session) as wheel:
            return _extract(interface, wheel)


def _download(interface: Interface) -> dict[str, bytes]:
    """Download the wheel, take the files and drop the rest."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "download", *WHEEL_FOR, "--dest", directory]
        subprocess.run([*command, interface.requirement], check=True)
        (wheel,) = Path(directory).glob("*.whl")
        with wheel.open("rb") as file:
            return _extract(interface, file)


def _extract(interface: Interface, wheel: IO[bytes]) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in interface.files}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    for interface in INTERFACES:
        if not interface.is_cached():
            fetch(interface)
