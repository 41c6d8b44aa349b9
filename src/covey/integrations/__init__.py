"""Programs written for other frameworks. Nothing else in covey imports this package.

`lightning`            a Lightning strategy
`accelerate`           an Accelerator for Hugging Face programs
`mindspore_launcher`   starts MindSpore's own scheduler beside rank 0
`taskd`                TaskD's calls
"""
