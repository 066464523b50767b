"""Independent PyTorch reference of the Kimi K3 text model, written from the specification.

The package is an oracle, not a server: eager, one sequence at a time, every formula a plain
function. It shares no code with the other packages of this project, because two implementations
that share code agree in their mistakes. Importing the package does nothing; import the module that
is needed:

* `torch_ref.config`: the architecture, read from `config.json`.
* `torch_ref.numerics`: the choice of number format and of the rounding profile.
* `torch_ref.loader`: checkpoint tensors, from a folder or from a dict.
* `torch_ref.ops`: one function per formula.
* `torch_ref.model`: the layer loop, the caches of a sequence, greedy decoding.
* `torch_ref.draft`: the DSpark draft and its context cache.
* `torch_ref.speculation`: acceptance rules, speculative decoding, exact enumeration.

`vllm_record.py` is a script beside them, for an environment with vLLM.
"""
