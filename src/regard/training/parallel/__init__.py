"""Training on several devices with torch's FSDP2 and DTensor, applied to a model from outside.

Why: models are single-device code; how they are distributed depends on the machine.

How: `Mesh` (`mesh.py`) is one process's view of all of them. Its `prepare` splits layers over the
tensor ranks (`tensor.py`) and sequences over the context ranks (`context.py`), and shards weights
with FSDP2. `state.py` turns any layout into plain tensors under the names of one device, and back.
In float32, five AdamW steps on 2 and 4 processes give one device's losses and gradient norms within
1e-5 relative; tests/training/test_parallel.py checks this.

Left out: pipeline and expert parallelism; splitting the vocabulary, or the sequences of an
encoder–decoder.
"""

from regard.training.parallel.mesh import Layout, Mesh

__all__ = ["Layout", "Mesh"]
