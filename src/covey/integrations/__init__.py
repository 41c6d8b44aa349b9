"""Support for scripts of other frameworks. No other package of covey imports this one.

`lightning`            a Lightning strategy
`accelerate`           an Accelerator for Hugging Face scripts
`mindspore_launcher`   starts MindSpore's own scheduler beside rank 0
`taskd`                TaskD's calls
"""
