"""TaskD's names, forwarded to covey: put the folder that `covey compat` prints on PYTHONPATH. See docs/taskd.md."""
