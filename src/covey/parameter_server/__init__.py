"""Parameter servers: processes that hold and update rows of parameters, and the client that workers use. Needs no torch.

The rows of every parameter are divided into 256 slots. The *sharding*, which has a version, assigns each slot to a server. With
replicas enabled, another server, the *replica holder*, keeps a copy of a server's rows.

`server`             the server: connections, dispatch, restore
`rows`               the server's own rows, their lock and their state; `request_handler` handles workers' requests to them
`rebalancer`         moves slots between servers until this server has those of the newest sharding
`client`             the worker's side; `server_requests` is its connection to one server, `row_cache` its cache
`messages`           requests and replies; `array_codec` encodes row numbers and values
`discovery`          addresses and tokens of the servers, in the rendezvous store
`row_placement`      which server holds a row, vectorized
`shard_set`          all rows of a server; `shard` has the rows of some slots, `table` those of one parameter
`optimizers`         update rules
`replica_sender`     applies changes and sends them to the replica holder; `replica_store` is the holder's side
`checkpoint_files`   checkpoint files of rows and optimizer state
"""
