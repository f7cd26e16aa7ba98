"""The stepper: a run as a walk over operations, stopped between them or at the tensors that they name.

What runs is what runs without it: the operations of `Model.begin` or `Deployment.begin`, in that engine's own order.
An operation runs as a whole; the tensors that it names are then gone through one by one. Going back means running
again from the start, which gives the same bits.
"""

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase

from refmodel.generate import Item, Step, Work, passes
from refmodel.program import Operation
from refmodel.stepper.debug import break_at, traced, untraced_after
from refmodel.stepper.origin import Route
from refmodel.stepper.target import Stop, Target, step_of
from refmodel.trace import Recording, record


class Stepper:
    """A run of `engine` (a `Model`, or a `Deployment`) over prompts, of which nothing has happened yet.

    prompts: lists of token ids. new_tokens: how many to generate behind the prefill; 0 for the prefill alone.
    settings: those of `refmodel.generate.passes` (`speculative`, `temperature`, ...).

    here: the operation that comes next, None at the end. operations: those that ran. last: the last of them. inside:
    the name of the tensor that one stands at, None between operations. tensors: name -> the rows so far of all that
    was named. works: the passes that have begun. routes: what each rank received in each exchange. stuck: why no
    operation can come next, where ranks wait for each other.
    steps: logits and hidden state of each request, once the pass is over. generated: the end of a generation.
    Raises ValueError for prompts that the engine does not take.
    """

    def __init__(self, engine, prompts, new_tokens: int = 0, **settings):
        model = getattr(engine, "model", engine)
        self.config = model.config
        self._prompts = [model.check_ids(prompt) for prompt in prompts]
        if not self._prompts:
            raise ValueError("no prompts: a run needs at least one")
        self._source, self._new_tokens, self._settings = engine, new_tokens, settings
        self.restart()

    # Moves.

    def restart(self):
        """Back to before the first operation."""
        self.engine = self._source.fresh()
        self.tensors, self.routes, self.works = Recording(), [], []
        self.operations: list[Operation] = []
        self.here = self.inside = self.generated = None
        self._last_work: Work | None = None
        self.steps: list[Step] = []
        self._goal = 0  # how many operations ran, or are to have run once `settle` is over
        self._made, self._hidden = Recording(), []  # what the last operation named, and what of it is not shown yet
        self._walk = self._operations()
        self._broken = True  # until a move is over: what breaks off in between is run again from the start
        self.stuck: Exception | None = None
        self._fetch()
        self._check_stuck()

    def next(self) -> Operation | None:
        """Finish the operation one is inside of, else run the next one. Returns it; None at the end of the run."""
        self.settle()
        if self.inside is None:
            if self.here is None:
                self._check_stuck()
                return None
            self._execute()
        self._leave()
        return self.last

    def into(self) -> str | None:
        """The next tensor of the operation one is inside of, or the first of the next operation.

        Returns its name; None if the operation that just ran names none, or at the end of the run (`here` is None).
        """
        self.settle()
        if not self._hidden:
            self.inside = None
            if self.here is None:
                self._check_stuck()
                return None
            self._execute()
        self.inside = self._show() if self._hidden else None
        return self.inside

    def until(
        self,
        tensor: str | None = None,
        *,
        stage: str | None = None,
        layer: int | None = None,
        rank: int | None = None,
        micro_batch: int | None = None,
        step: int | None = None,
        check: Callable[[Recording, str], object] | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Stop:
        """Go on to the next thing that all given conditions hold for; without any, to the end.

        tensor: a name, or a pattern with `*`; one stops at the tensor. check(made, name): stop at the first tensor for
        which it returns something true; `made` maps names to all tensors of that operation.
        Without those two, one stops before an operation: where a layer, a rank or a micro-batch is entered, or at every
        operation where a stage is given. step: 0 is the prefill. interrupted() is asked between operations.
        Raises ValueError for a stage, layer or rank that this run does not have.
        """
        target = Target(stage, layer, rank, micro_batch, step)
        target.check(self.config, self.num_ranks)
        self.settle()
        if tensor is not None or check is not None:
            return self._until_tensor(tensor, target, check, interrupted)
        return self._until_operation(target, interrupted)

    def back(self, count: int = 1):
        """To before the operation that was last (or `count` of them), by running everything before it again."""
        if count < 1:
            raise ValueError(f"back {count}: must be at least 1")
        if self._goal == 0 and not self._broken:
            raise ValueError("back: this is the beginning of the run")
        self._replay(max(0, self._goal - count))

    def debug(self, debugger):
        """Run the next operation under `debugger` (a `pdb.Pdb`), from its first line.

        Inside an operation, that operation runs again and stops on the line after the one that named the tensor one
        stands at. Raises `bdb.BdbQuit` where the person quits; one is then before the operation.
        """
        self.settle()
        wanted = self.inside
        if wanted is not None:
            self.back()
            self._execute(untraced_after, break_at(debugger, wanted))
        elif self.here is not None:
            self._execute(lambda operation: traced(debugger, operation))
        self._leave()

    def settle(self):
        """Where an operation broke off, run again what was done before it. Every move does this first."""
        if self._broken:
            self._replay(self._goal)

    # What there is to see.

    @property
    def last(self) -> Operation | None:
        """The operation that ran last."""
        return self.operations[-1] if self.operations else None

    @property
    def done(self) -> bool:
        """Whether the run is over."""
        return self.here is None and not self._broken and self.stuck is None

    @property
    def at(self) -> Operation:
        """The operation at hand: the one that one is inside of, else the next one, at the end the last one."""
        return self.last if self.inside is not None or self.here is None else self.here

    @property
    def work(self) -> Work:
        """The pass of the operation at hand."""
        return self._last_work if self.at is self.last else self.works[-1]

    @property
    def values(self) -> dict:
        """What the stages of the micro-batch at hand share now: name -> array, exchange, ..."""
        return self.at.state.values

    @property
    def made(self) -> list[str]:
        """Names of the tensors of the last operation, as far as they are shown."""
        return [name for name in self._made if name not in self._hidden]

    @property
    def num_hidden(self) -> int:
        """How many tensors of the last operation are not shown yet."""
        return len(self._hidden)

    def made_rows(self, name: str):
        """The global rows of a tensor that the last operation made; None: the whole tensor."""
        return self._made.rows(name)

    def rank_of(self, request: int) -> int:
        """The rank that holds a request."""
        return 0

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return 1

    # How.

    def _operations(self) -> Iterator[Operation]:
        """Every operation of every pass."""
        walk, steps = self._passes(), None
        while True:
            try:
                work = walk.send(steps)
            except StopIteration as end:
                self.generated = end.value
                return
            self.works.append(work)
            current = self.engine.begin(work)
            yield from current.operations
            self.steps = steps = current.finish()

    def _passes(self):
        if self._new_tokens:
            return passes(self.engine, self._prompts, self._new_tokens, **self._settings)
        return self._prefill()

    def _prefill(self):
        items = [Item(i, ids, self.engine.new_cache(i), 0) for i, ids in enumerate(self._prompts)]
        yield Work(items, "prefill")

    def _execute(self, run: Callable = Operation.run, hook: Callable | None = None):
        """Run the next operation; its tensors are not shown yet."""
        operation, work = self.here, self.works[-1]
        self._broken = True
        with record(hook) as made:
            run(operation)
        if operation.stage.name == "dispatch_recv":
            self.routes.append(Route.of(operation, work, self.config.num_experts_per_tok))
        self._made, self._hidden = made, list(made)
        self.operations.append(operation)
        self._last_work, self.inside = work, None
        self._goal += 1
        self._fetch()

    def _fetch(self):
        """Find what comes next. Where nothing can, the next move says why; one can still look, and go back."""
        self.here = None
        try:
            self.here = next(self._walk, None)
        except Exception as error:
            self.stuck = error
        self._broken = False

    def _check_stuck(self):
        if self.stuck is not None:
            raise self.stuck

    def _show(self) -> str:
        name = self._hidden.pop(0)
        self.tensors.join([{name: self._made.parts()[name]}])
        return name

    def _leave(self):
        while self._hidden:
            self._show()
        self.inside = None

    def _replay(self, count: int):
        self.restart()
        for _ in range(count):
            try:
                self._execute()
            except BaseException:
                self._goal = count  # where one wanted to be, for the next try
                raise
            self._leave()

    def _until_tensor(self, tensor, target, check, interrupted) -> Stop:
        while True:
            while self._hidden:
                name = self._show()
                if (tensor is None or fnmatchcase(name, tensor)) and target.holds(self.last, step_of(self._last_work)):
                    detail = None if check is None else check(self._made, name)
                    if check is None or detail:
                        self.inside = name
                        return Stop("tensor", name, detail)
            self.inside = None
            if self.here is None:
                self._check_stuck()
                return Stop("end")
            if interrupted():
                return Stop("interrupted")
            self._execute()

    def _until_operation(self, target, interrupted) -> Stop:
        self._leave()
        anything = target != Target()
        was = target.holds(self.here, step_of(self.works[-1]))
        while self.here is not None:
            if interrupted():
                return Stop("interrupted")
            self._execute()
            self._leave()
            now = anything and target.holds(self.here, step_of(self.works[-1]))
            if now and (target.stage is not None or not was):
                return Stop("operation")
            was = now
        self._check_stuck()
        return Stop("end")
