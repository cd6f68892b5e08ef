"""What devices can do at best, from their makers' data sheets."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lightning_pipeline.errors import ConfigurationError

_TERA, _GIGA = 1e12, 1e9
_GIB = 2.0**30


@dataclass(frozen=True, eq=False)
class Device:
    """A device, the links of the machine that it is sold in, and where that is written.

    Attributes:
        name: What a user types.
        title: Its name in full.
        peak: Dense operations per second by type: `bf16`, `fp16`, `tf32`, `fp32`, `fp64`.
        memory: Bytes; what is sold as 80 GB has 80 GiB, less what it keeps for itself.
        bandwidth: Bytes per second of its memory.
        link: Bytes per second to another device of the node, in one direction.
        node_link: Bytes per second of a device to another node, in one direction.
        node_size: Devices of a node.
        source: The data sheet; what it leaves open is said with it.
    """

    name: str
    title: str
    peak: Mapping[str, float]
    memory: float
    bandwidth: float
    link: float
    node_link: float
    node_size: int
    source: str

    def flops(self, dtype: torch.dtype) -> float:
        """Peak operations per second in a type; float32 as `torch.set_float32_matmul_precision` has it."""
        if dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest":
            return self.peak.get("tf32", self.peak["fp32"])
        return self.peak.get(_NAMES.get(dtype, "fp32"), self.peak["fp32"])


_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


def _device(
    name: str, title: str, peak: tuple[float, float, float, float, float], memory: float, bandwidth: float,
    links: tuple[float, float], node_size: int, source: str,
) -> Device:  # fmt: skip
    kinds = ("bf16", "fp16", "tf32", "fp32", "fp64")
    peaks = {kind: number * _TERA for kind, number in zip(kinds, peak, strict=True)}
    return Device(
        name, title, peaks, memory * _GIB, bandwidth * _GIGA, links[0] * _GIGA, links[1] * _GIGA,
        node_size, source,
    )  # fmt: skip


_NVIDIA = "https://www.nvidia.com/en-us"
_H100 = f"{_NVIDIA}/data-center/h100/, https://docs.nvidia.com/dgx/dgxh100-user-guide/"
_A100 = f"{_NVIDIA}/data-center/a100/, https://docs.nvidia.com/dgx/dgxa100-user-guide/"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
# bf16, fp16, tf32, fp32, fp64 TFLOP/s dense; GB; GB/s of memory; GB/s in a node and between nodes, one way
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _device("b200", "NVIDIA B200 (HGX)", (2250, 2250, 1125, 75, 37), 180, 8000, (900, 50), 8,
                f"{_NVIDIA}/data-center/hgx/, a device is an eighth; https://docs.nvidia.com/dgx/dgxb200-user-guide/"),
        _device("h200", "NVIDIA H200 SXM", (989, 989, 494, 67, 34), 141, 4800, (450, 50), 8,
                f"{_NVIDIA}/data-center/h200/; network as DGX H200"),
        _device("h100", "NVIDIA H100 SXM 80 GB", (989, 989, 494, 67, 34), 80, 3350, (450, 50), 8, _H100),
        _device("h100-pcie", "NVIDIA H100 PCIe", (756, 756, 378, 51, 26), 80, 2000, (64, 25), 8,
                f"{_NVIDIA}/data-center/h100/; network assumed at 200 Gb/s a device"),
        _device("a100", "NVIDIA A100 SXM 80 GB", (312, 312, 156, 19.5, 9.7), 80, 2039, (300, 25), 8, _A100),
        _device("a100-40", "NVIDIA A100 SXM 40 GB", (312, 312, 156, 19.5, 9.7), 40, 1555, (300, 25), 8,
                _A100),
        _device("v100", "NVIDIA V100 SXM2 32 GB", (15.7, 125, 15.7, 15.7, 7.8), 32, 900, (150, 12.5), 8,
                f"{_NVIDIA}/data-center/v100/; network as DGX-1 and DGX-2; no bf16 cores: fp32's speed"),
        _device("l40s", "NVIDIA L40S", (362, 362, 183, 91.6, 1.4), 48, 864, (32, 12.5), 8,
                f"{_NVIDIA}/data-center/l40s/; network assumed at 100 Gb/s a device"),
        _device("l4", "NVIDIA L4", (121, 121, 60, 30.3, 0.5), 24, 300, (32, 12.5), 8,
                f"{_NVIDIA}/data-center/l4/, half of its figures with sparsity; network assumed at 100 Gb/s"),
        _device("a10", "NVIDIA A10", (125, 125, 62.5, 31.2, 1.0), 24, 600, (32, 12.5), 4,
                f"{_NVIDIA}/data-center/products/a10-gpu/; network assumed at 100 Gb/s"),
        _device("4090", "NVIDIA GeForce RTX 4090", (165, 165, 82.6, 82.6, 1.3), 24, 1008, (32, 1.25), 4,
                f"{_ADA} (sums in fp32); no peer-to-peer, network assumed at 10 Gb/s"),
        _device("3090", "NVIDIA GeForce RTX 3090", (71, 71, 35.6, 35.6, 0.6), 24, 936, (32, 1.25), 4,
                "https://images.nvidia.com/aem-dam/en-zz/Solutions/geforce/ampere/pdf/NVIDIA-ampere-GA102-GPU-Architecture-Whitepaper-V1.pdf"
                " (sums in fp32); network assumed at 10 Gb/s"),
        _device("mi300x", "AMD Instinct MI300X", (1307, 1307, 654, 163, 82), 192, 5300, (64, 50), 8,
                "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html; one of seven links"
                " to each neighbour, network assumed at 400 Gb/s"),
    )
}  # fmt: skip


def device_named(name: str) -> Device:
    """The device that a user means.

    Raises:
        ConfigurationError: It is not known.
    """
    found = DEVICES.get(name.lower().removeprefix("rtx").strip(" -"))
    if found is None:
        raise ConfigurationError(
            f"device {name!r} is not known: use one of {', '.join(DEVICES)}, or give its numbers with "
            "--tflops, --bandwidth, --memory and --link"
        )
    return found


def known_device(device: torch.device) -> Device | None:
    """The entry of a device that is here; `None` for a CPU and what is not listed.

    Args:
        device: Of this process.
    """
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).lower().split()
    memory = torch.cuda.get_device_properties(device).total_memory
    fitting = [known for known in DEVICES.values() if known.name.split("-")[0] in words]
    return min(fitting, key=lambda known: abs(known.memory - memory), default=None)
