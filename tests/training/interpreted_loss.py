"""The loss's kernel by Triton's interpreter: run as a script by test_loss.py; prints JSON."""

import json

import torch
import torch.nn.functional as F

from regard.training import loss, loss_kernels


def compare(n: int, width: int, n_real: int, smoothing: float) -> tuple[float, float, float]:
    """The kernel's and plain torch's largest error in losses and gradients, the largest score."""
    torch.manual_seed(n)
    scores = torch.randn(n, width) * 3
    targets = torch.randint(0, n_real, (n,))
    targets[1] = loss.NOTHING
    plain, kernel = scores.clone(), scores.clone()
    expected = loss.logits_to_gradient(plain, targets, smoothing, n_real, True)
    found = loss_kernels.run(kernel, targets, smoothing, n_real, True)
    untouched = scores.clone()
    again = loss_kernels.run(untouched, targets, smoothing, n_real, False)
    assert torch.equal(untouched, scores) and torch.equal(again, found)
    assert not kernel[:, n_real:].any() and not kernel[1].any() and found[1] == 0
    wide = scores[:, :n_real].double().requires_grad_()
    exact = F.cross_entropy(
        wide, targets, ignore_index=loss.NOTHING, reduction="none", label_smoothing=smoothing
    )
    (by_scores,) = torch.autograd.grad(exact.sum(), wide)
    errors = [
        max(float((losses - exact).abs().max()), float((made[:, :n_real] - by_scores).abs().max()))
        for losses, made in ((found, kernel), (expected, plain))
    ]
    return errors[0], errors[1], float(scores.abs().max())


loss_kernels.COLUMNS = 64
print(
    json.dumps(
        [
            compare(5, 131, 127, 0.0),
            compare(7, 257, 257, 0.1),
            compare(3, 50, 47, 0.3),
        ]
    )
)
