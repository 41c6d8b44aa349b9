"""Support for scripts of other frameworks. Apart from deprecated names, no other package of covey imports this one.

`lightning`            a Lightning strategy
`accelerate`           an Accelerator for Hugging Face scripts
`mindspore_launcher`   starts MindSpore's own scheduler beside rank 0
`taskd`                TaskD's calls
`taskd_shim`           a package named taskd that forwards to `taskd`, for PYTHONPATH
"""
