"""The line `import taskd.python.adaptor.patch` leads through here."""
