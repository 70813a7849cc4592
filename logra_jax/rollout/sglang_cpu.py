"""SGLang's platform for machines without a GPU: plain torch.

SGLang serves on a CPU with kernels of its own, which exist for some machines only. On
this platform every fused operation takes its form in plain torch instead; nothing in
SGLang is patched. SGLang finds it by the entry point `logra_cpu` of the group
`sglang.srt.platforms`; only `SGLANG_PLATFORM=logra_cpu` chooses it, which `logra serve`
sets where it is wanted. Everywhere else, as on a machine with GPUs, it declines.

Imported inside the server only: it needs SGLang, and neither JAX nor the rest of the
package.
"""

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin  # pyright: ignore
from sglang.srt.platforms.device_mixin import PlatformEnum  # pyright: ignore
from sglang.srt.platforms.interface import (  # pyright: ignore
    PlatformCapabilities,
    SRTPlatform,
)

from logra_jax.rollout.sglang_start import cpu_chosen


def activate() -> str | None:
    """Answer SGLang: the platform's class, or None where it was not chosen."""
    return f"{__name__}:TorchPlatform" if cpu_chosen() else None


class TorchPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU whose operations are all plain torch."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """No: there is no device to pin memory for."""
        return False

    def get_default_attention_backend(self) -> str:
        """Attention in plain torch."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """Have fused operations take their `forward_native`."""
        return "native"
