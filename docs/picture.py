"""Takes the picture of a report's page that the docs show: `make docs/report.png`."""

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from browser.chromium import picture  # noqa: E402
from npu_fuse.runtime.cli import main  # noqa: E402

with tempfile.TemporaryDirectory() as folder:
    page = Path(folder) / "report.html"
    main(["explain", "gemma3_text", "--layers", "6", "--phase", "prefill", "--quiet", "--html", str(page)])
    picture(page, "site-22", HERE / "report.png")
