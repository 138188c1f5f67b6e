"""The loss's kernel by Triton's interpreter: run as a script by test_loss.py; prints JSON."""

import json

import torch

from regard.training import loss, loss_kernels


def compare(n: int, width: int, n_real: int, smoothing: float, dtype: torch.dtype) -> float:
    """The largest difference between the kernel and plain torch, in losses and gradients."""
    torch.manual_seed(n)
    scores = (torch.randn(n, width) * 3).to(dtype)
    targets = torch.randint(0, n_real, (n,))
    targets[1] = loss.NOTHING
    plain, kernel = scores.clone(), scores.clone()
    expected = loss.turn_into_gradient(plain, targets, smoothing, n_real, True)
    found = loss_kernels.run(kernel, targets, smoothing, n_real, True)
    untouched = scores.clone()
    again = loss_kernels.run(untouched, targets, smoothing, n_real, False)
    assert torch.equal(untouched, scores) and torch.equal(again, found)
    assert not kernel[:, n_real:].any() and not kernel[1].any() and found[1] == 0
    gaps = (expected - found).abs().max(), (plain - kernel).float().abs().max()
    return float(max(gaps))


loss_kernels.COLUMNS = 64
print(
    json.dumps(
        [
            compare(5, 131, 127, 0.0, torch.float32),
            compare(7, 257, 257, 0.1, torch.float32),
            compare(3, 50, 47, 0.3, torch.float32),
        ]
    )
)
