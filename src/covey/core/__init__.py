"""Decisions, and nothing else.

Here lives what covey decides: who is a member, who has which rank, when the cluster is complete, when a node is dead, what
happens then. Decisions take events and `now` and return effects and a reason.

    nouns               `model`, `cluster`, `messages` (said on the wire), `events` (facts in), `effects` (wishes out)
    the scheduler's     `ledger`, `resizing`, `sharing`, `spares`, `lifecycle`, `watch`, `joining`, `asking`, `machine`: one
                        object, layer on layer, which carries out what these decide: `membership`, `formation`, `ranks`,
                        `recovery`, `scaling`, `healing`; `board` is where ranks meet. `ledger` says what each layer does
    a node's            `node`
    several schedulers  `leadership`
    parameter servers   `serving`, `shards`
    what people see     `view`, `story`, `incidents`, `words` (counts in sentences); `chaos` chooses faults
    federated           `federation` (nouns), `rounds` on `window` and `roster`, `managed`, `claims`; secure rounds: `secure`
                        (nouns), `secure_round`, `masked`, `graph`, `shamir`; `dp` counts privacy
    elsewhere's words   `taskd`; Kubernetes' are in `core.job`

Not here: sockets, files, clocks, randomness, asyncio, torch. If a test of something here needs a sleep or a patch, the
decision is in the wrong room.
"""
