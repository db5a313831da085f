"""`encoder.demo` is light: finding the demo's files needs none of the heavy libraries."""

import subprocess
import sys


def test_importing_the_demo_imports_nothing_heavy() -> None:
    script = (
        "import sys, encoder.demo as demo; "
        "assert demo.demo_model_path().is_dir() and len(demo.demo_pictures()) == len(demo.demo_labels()) == 12; "
        "print(sorted({'torch', 'ray', 'transformers', 'PIL', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
