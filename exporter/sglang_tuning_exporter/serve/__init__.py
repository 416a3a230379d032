"""The running exporter: its HTTP application, metrics, pages and access control.

Other rooms use `run.serve`, `process.bind` and `process.outlive_hang_up`, and of `metrics` the families for the
reference; a container runs `probe`. Nothing is imported here: a sidecar that is only scraped should not load the pages,
and `--help` should load nothing of this room.
"""

__all__ = ["metrics", "probe", "process", "run"]
