"""Which request lives on which rank of a deployment, and in which cache."""

from collections.abc import Iterable

from refmodel.cache import LatentCache


class Residents:
    """Requests of `num_ranks` ranks, each with the cache that its last pass wrote."""

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self._ranks: dict[int, int] = {}
        self._caches: dict[int, LatentCache] = {}

    def rank_of(self, request: int) -> int:
        """Where it was placed, else request mod ranks."""
        return self._ranks[request] if request in self._ranks else request % self.num_ranks

    def place(self, request: int, rank: int) -> None:
        """Raises ValueError for a rank that does not exist, and for a request that has tokens on another one."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank = {rank}: must be between 0 and {self.num_ranks - 1}")
        if self.holds(request) and self.rank_of(request) != rank:
            cached, here = self._caches[request].length, self.rank_of(request)
            raise ValueError(f"request {request} has {cached} tokens on rank {here}: it cannot go on on rank {rank}")
        self._ranks[request] = rank

    def start_anew(self, ranks: Iterable[int]) -> None:
        """Forget all requests; requests 0, 1, ... live on `ranks` from here on."""
        self._ranks, self._caches = dict(enumerate(ranks)), {}

    def holds(self, request: int) -> bool:
        """Whether it has tokens in a cache."""
        return request in self._caches and self._caches[request].length > 0

    def keep(self, request: int, cache: LatentCache) -> None:
        """A pass of the request writes `cache`."""
        self._caches[request] = cache

    def cache_of(self, request: int) -> LatentCache:
        """Raises ValueError for a request that has run nothing."""
        if request not in self._caches:
            known = ", ".join(map(str, self._caches)) or "none"
            raise ValueError(f"request {request} has run nothing on this deployment; requests that have: {known}")
        return self._caches[request]

    def forget(self, request: int) -> None:
        """It has ended; its pages belong to its cache still."""
        self._ranks.pop(request, None)
        self._caches.pop(request, None)
