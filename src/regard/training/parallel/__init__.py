"""Several devices on torch's own engine, put on a model from outside.

Why: models are single-device code and stay it; how their weights and their text are spread over
processes is a question of the machine.

How: `Mesh` is one process's view of all of them. `prepare` cuts the projections of each layer
over the tensor ranks (`tensor.py`), lets attention see the keys of the whole text where the text
is cut over the context ranks (`context.py`), and shards what remains with FSDP2 over all ranks that
read different tokens (`mesh.py`). Snapshots know nothing of it: `state.py` turns any layout into
plain tensors under the names of one device, and back.

The bound: in float32, five AdamW steps on 2 and 4 processes give one device's losses and gradient
norms within 1e-5 relative; tests/training/test_parallel.py holds it.

Left out: pipelines, experts, a vocabulary cut over ranks, and text of encoder–decoders cut over
ranks.
"""

from regard.training.parallel.mesh import Layout, Mesh

__all__ = ["Layout", "Mesh"]
