"""What goes wrong in a world, and when: each fault is one method, drawn by name from the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.plan import Place
from tests.simulation.processes import AgentProcess, NodeProcess

from covey.core.messages import Register
from covey.core.strategy_ladder import RecoveryStrategy

if TYPE_CHECKING:
    from tests.simulation.world import World


class Chaos:
    """Draws one fault after another until the world heals."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._faults = {
            "kill node": self._kill_node,
            "hang node": self._hang_node,
            "leave": self._leave,
            "fail": self._fail,
            "preempt": self._preempt,
            "break group": self._break_group,
            "cut link": self._cut_link,
            "cut path": self._cut_path,
            "cut one way": self._cut_one_way,
            "kill scheduler": self._kill_scheduler,
            "kill scheduler mid-step": self._kill_scheduler_mid_step,
            "hang scheduler": self._hang_scheduler,
            "imposter": self._imposter,
            "stranger": self._stranger,
            "stop": self._stop,
            "say gone": self._say_gone,
        }

    def begin(self) -> None:
        """Some schedulers die in the first step that matters, the formation."""
        if "kill scheduler mid-step" in self.world.plan.faults and self.world.random.random() < 0.3:
            self._kill_scheduler_mid_step()
        self._wait()

    def _wait(self) -> None:
        self.world.after(self.world.random.expovariate(1 / self.world.plan.fault_every_s), self._next)

    def _next(self) -> None:
        if not self.world.healing:
            self._faults[self.world.random.choice(self.world.plan.faults)]()
            self._wait()

    # -- nodes -------------------------------------------------------------------------------------------------------

    def _some_node(self, children: bool = True) -> NodeProcess | None:
        awake: list[NodeProcess] = self.world.awake()
        if children:
            agents = [node for node in awake if isinstance(node, AgentProcess)]
            awake += [child for agent in agents for child in agent.children.values() if child.alive]
        return self.world.random.choice(awake) if awake else None

    def _kill_node(self) -> None:
        if node := self._some_node():
            node.die(silently=self.world.random.random() < 0.3)
            self.world.node_finished(node)

    def _hang_node(self) -> None:
        if node := self._some_node():
            node.hang()
            self.world.after(self.world.random.choice((0.5, 5.0, 40.0)), node.wake)

    def _leave(self) -> None:
        if node := self._some_node(children=False):
            node.leave(0, "its work is done")

    def _fail(self) -> None:
        if node := self._some_node():
            node.leave(1, "an exception in its program")

    def _preempt(self) -> None:
        """A worker is asked to go; it finishes its step and hands its rank over."""
        if (node := self._some_node()) and node.trainer is not None:
            node.trainer.asked_to_leave = True

    def _break_group(self) -> None:
        """The connections of one rank to the others break."""
        waiting = [trainer for trainer in self.world.trainers() if trainer.waits]
        if waiting and RecoveryStrategy.RETRY in self.world.plan.cluster.strategies:
            trainer = self.world.random.choice(waiting)
            trainer.node.post(trainer.break_group)

    def _say_gone(self) -> None:
        """A process is said to be over. Mostly it is; one on a lost node still runs, and must not come back."""
        node, scheduler = self._some_node(children=False), self.world.scheduler
        if node is None or scheduler is None:
            return
        if self.world.random.random() < 0.7:
            node.die(silently=self.world.random.random() < 0.5)
            self.world.node_finished(node)
        self.world.tell(node.name, "said to be gone")
        scheduler.host_gone(node.wish.host.life)

    def _imposter(self) -> None:
        """A second process with the settings of one that runs."""
        self.world.past.append(self.world.spawn(self.world.random.choice(self.world.plan.places)))

    def _stranger(self) -> None:
        """One node too many, or one that was started with other numbers."""
        world = self.world
        node = world.spawn(Place("x", f"h{world.random.randint(0, 9)}", node_id=world.random.choice(("", "stray", "0", "99"))))
        if isinstance(node.machine.registration, Register) and world.random.random() < 0.3:
            node.machine.registration.fingerprint["MS_WORKER_NUM"] = "77"
        world.past.append(node)

    # -- paths -------------------------------------------------------------------------------------------------------

    def _cut_link(self) -> None:
        if node := self._some_node():
            node.cut()

    def _cut_path(self) -> None:
        host = self.world.random.choice(self.world.plan.places).host
        self._cut((host, "hs"), ("hs", host))

    def _cut_one_way(self) -> None:
        host = self.world.random.choice(self.world.plan.places).host
        self._cut(self.world.random.choice(((host, "hs"), ("hs", host))))

    def _cut(self, *paths: tuple[str, str]) -> None:
        lasts = self.world.random.choice((1.0, 10.0, 60.0))
        for path in paths:
            self.world.tell("net", "blocks", f"{path[0]} to {path[1]} for {lasts} s")
            self.world.net.block(*path)
            self.world.after(lasts, self.world.net.unblock, *path)

    # -- the scheduler -----------------------------------------------------------------------------------------------

    def _kill_scheduler(self) -> None:
        self.world.crash_scheduler("while idle", silently=self.world.random.random() < 0.3)

    def _kill_scheduler_mid_step(self) -> None:
        if self.world.scheduler is not None:
            self.world.scheduler.crash_armed = True

    def _hang_scheduler(self) -> None:
        if (scheduler := self.world.scheduler) is not None:
            scheduler.hang()
            self.world.after(self.world.random.choice((0.5, 5.0, 40.0)), scheduler.wake)

    def _stop(self) -> None:
        """A visitor asks for the end; rarely, for it is the end."""
        if self.world.scheduler is not None and self.world.random.random() < 0.1:
            self.world.scheduler.stop()
