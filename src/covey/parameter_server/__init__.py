"""Parameter servers: processes that hold and update rows of parameters, and the client that workers use. Needs no torch.

The rows of every parameter are divided into 256 slots. The *sharding*, which has a version, assigns each slot to a server. With
replicas enabled and at least two servers, another server, the *replica holder*, keeps a copy of a server's rows.

`server`             the server: connections, dispatch, restore
`rows`               the server's own rows, their lock and their state; `request_handler` handles workers' requests to them
`rebalancer`         hands over slots that the newest sharding assigns to other servers, and takes those of this server
`client`             the worker's side; `server_requests` is its connection to one server, `row_cache` its cache
`messages`           requests and replies; `row_blocks` decodes row numbers and values
`discovery`          addresses and tokens of the servers, in the rendezvous store
`row_placement`      the server of each row, for arrays of row numbers
`shard_set`          all rows of a server; `shard` has the rows of some slots, `table` those of one parameter
`optimizers`         update rules
`replica_sender`     applies changes and sends them to the replica holder; `replica_store` is the holder's side
`checkpoint_files`   checkpoint files of rows and optimizer state
"""
