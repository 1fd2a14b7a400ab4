"""These tests need scikit-learn, which is an extra."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("sklearn") else ["test_*.py"]
