"""``python -m lit_llm``, the same as ``lit-llm``."""

from __future__ import annotations

import sys

from lit_llm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
