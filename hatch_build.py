"""Builds the native kernels into the package when it is installed, or a wheel of it is built."""

import importlib.util
import platform
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "src/penstock/kernels/native"


class KernelsHook(BuildHookInterface):  # type: ignore[misc]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        spec = importlib.util.spec_from_file_location("penstock_build", Path(self.root, NATIVE, "build.py"))
        assert spec and spec.loader
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        try:
            build.build()
        except (build.CannotBuild, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"Penstock will run on torch's kernels, several times slower: {error}")
            return
        build_data["artifacts"].append(f"{NATIVE}/{build.LIBRARY.name}")
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"
        build_data["pure_python"] = False
