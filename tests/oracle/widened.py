"""The installed Hugging Face model with its internal fp32 casts widened and its top-k made stable.

Nothing of it is kept here: the installed source is rewritten in memory when a test asks for it.
"""

import importlib
import inspect
import re
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from transformers import modeling_rope_utils

_PACKAGE = "transformers.models.deepseek_v4"
_UNSTABLE = "index_scores.topk(top_k, dim=-1).indices"
_STABLE = "index_scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]"


def _widen(source: str) -> str:
    source = re.sub(r"torch\.float(32)?\b(?!\d)", "torch.float64", source)
    return source.replace(".float()", ".double()")


@lru_cache(maxsize=1)
def widened_module() -> ModuleType:
    """Return a module like ``modeling_deepseek_v4``, all of whose arithmetic is float64."""
    original = importlib.import_module(f"{_PACKAGE}.modeling_deepseek_v4")
    path = Path(inspect.getfile(original))
    source = path.read_text()
    assert _UNSTABLE in source, "the installed model's top-k is spelt otherwise; adapt the rewrite"
    source = _widen(source.replace(_UNSTABLE, _STABLE))
    module = ModuleType(f"{_PACKAGE}.widened")
    module.__package__ = _PACKAGE
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    exec(compile(source, str(path), "exec"), module.__dict__)
    yarn = _widen(inspect.getsource(modeling_rope_utils._compute_yarn_parameters))
    scope = dict(vars(modeling_rope_utils))
    exec(compile(yarn, "widened yarn", "exec"), scope)
    table = dict(modeling_rope_utils.ROPE_INIT_FUNCTIONS)
    table["yarn"] = scope["_compute_yarn_parameters"]
    module.__dict__["ROPE_INIT_FUNCTIONS"] = table
    return module
