"""Package on the path of `import taskd.python.adaptor.patch`."""
