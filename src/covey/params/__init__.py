"""Parameter servers: rows of parameters, kept and updated in processes of their own.

`server` is what a process of role MS_PSERVER runs, `client` is what a worker asks through; between them are `messages`. A
server's rows lie on a `shelf` of `shards` of `tables`, updated by `optimizers`, found by `placement`, copied by `copies` and
kept on disk by `files`; a worker remembers some in a `cache`. Nothing here needs torch: a training process uses
this room through `covey.train.served`.
"""
