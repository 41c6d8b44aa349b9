"""TaskD's module names, forwarded to covey: add the directory that `covey compat` prints to PYTHONPATH (docs/taskd.md)."""
