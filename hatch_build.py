"""Compiles the native kernels into the package when it is installed, or when a wheel of it is built."""

import importlib.util
import os
import platform
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "src/penstock/kernels/native"
WITHOUT = "PENSTOCK_NO_KERNELS"

INSTALL = f"""\
Penstock's CPU kernels are C++ and are compiled when it is installed. {{reason}}

Install a C++ compiler (GCC 11 or later), then run the same command again:
    Debian, Ubuntu   apt install g++
    Fedora, RHEL     dnf install gcc-c++
    openSUSE         zypper install gcc-c++
    Arch             pacman -S gcc
or name another compiler in the environment variable CXX,
or install a wheel, which holds the compiled kernels,
or set {WITHOUT}=1 to install without them: models run on a GPU, and on a CPU several times slower.
"""


class KernelsHook(BuildHookInterface):  # type: ignore[misc]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get(WITHOUT, "0") not in ("", "0"):
            return
        spec = importlib.util.spec_from_file_location("penstock_build", Path(self.root, NATIVE, "build.py"))
        assert spec and spec.loader
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        try:
            build.build()
        except build.NoKernels as error:
            self.app.display_warning(f"{error}: torch's kernels will run, which are several times slower")
            return
        except build.CannotBuild as error:
            self.app.abort(INSTALL.format(reason=str(error)))
        build_data["artifacts"].append(f"{NATIVE}/{build.LIBRARY.name}")
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"
        build_data["pure_python"] = False
