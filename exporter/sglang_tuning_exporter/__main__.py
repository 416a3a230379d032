"""`python -m sglang_tuning_exporter`."""

import sys

from sglang_tuning_exporter.cli import main

sys.exit(main())
