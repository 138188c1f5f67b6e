"""What stands for a GPU where kernels are compiled without one."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import GPUTarget


class Driver:
    """A GPU that takes kernels and does not run them; of a number that no real one has."""

    class utils:
        @staticmethod
        def load_binary(*_: Any) -> tuple[int, ...]:
            return 0, 1, 32, 0, 1024

        @staticmethod
        def get_device_properties(_: int) -> dict[str, int]:
            return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    @staticmethod
    def launcher_cls(*_: Any) -> Any:
        return lambda *_: None

    def get_current_device(self) -> int:
        return 99

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)
