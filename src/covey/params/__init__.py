"""Parameter servers: rows of parameters, kept and updated in processes of their own.

`server` is what a process of role MS_PSERVER runs, and `desk` answers there; `client` is what a worker asks through, over a
`channel` to each. Between them are `messages`, whose bytes are `pieces`; `peers` says where the servers are. A server's rows
lie on a `shelf`, each `shard` of it with a `table` for every parameter, updated by `optimizers`, found by `placement`, copied
by `copies` to where they are `held`, and kept on disk by `files`; a worker remembers some in a `cache`. Nothing here needs
torch: a training process uses this room through `covey.train.served`.
"""
