"""Model FLOPs utilisation (MFU): the FLOPs that training needs, as a share of a device's peak.

MFU says how well a device is used, whatever the model. `count_flops` and `peak_flops` give its two
parts; the loop divides them.
"""

from __future__ import annotations

import torch

from regard.models import Transformer

PEAKS = {
    "B200": 2.25e15,
    "H200": 9.89e14,
    "H100": 9.89e14,
    "A100": 3.12e14,
    "L40": 1.81e14,
    "4090": 1.65e14,
    "V100": 1.25e14,
}
"""Dense half-precision FLOP/s as makers specify them, by a word of the device's name."""


def count_flops(model: Transformer) -> float:
    """FLOPs of one token in training, without attention scores: 6 for each weight.

    The embedding counts only as the output layer; looking up its rows costs nothing.
    """
    inner = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name)
    output = 0 if model.head is None else model.head.weight.numel()
    return 6.0 * (inner + output)


def peak_flops(device: torch.device) -> float | None:
    """The device's peak FLOP/s; None if it is not in `PEAKS`."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for word, peak in PEAKS.items() if word in name), None)
