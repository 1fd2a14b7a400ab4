"""The backends, each a module or a package that knows none of the others; `engine/plan.py` names them."""
