"""Several devices on torch's own engine, put on a model from outside.

Why: models are single-device code; how they are spread over processes depends on the machine.

How: `Mesh` (`mesh.py`) is one process's view of all of them. `prepare` cuts layers over the tensor
ranks (`tensor.py`) and the text over the context ranks (`context.py`), and shards the rest with
FSDP2. `state.py` turns any layout into plain tensors under the names of one device, and back. In
float32, five AdamW steps on 2 and 4 processes give one device's losses and gradient norms within
1e-5 relative; tests/training/test_parallel.py holds it.

Left out: pipelines, experts, a vocabulary or the text of an encoder–decoder cut over ranks.
"""

from regard.training.parallel.mesh import Layout, Mesh

__all__ = ["Layout", "Mesh"]
