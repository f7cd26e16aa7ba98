"""Pages of a rank's cache: who owns which, and none twice."""


class PagePool:
    """`num_pages` pages of `page_size` rows; the page freed last is given out first, so that stale use shows early."""

    def __init__(self, num_pages: int, page_size: int):
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"{num_pages=}, {page_size=}: a pool holds at least one page of at least one row")
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages))[::-1]
        self._owned = [False] * num_pages

    @property
    def free(self) -> int:
        """How many pages nobody owns."""
        return len(self._free)

    def pages_for(self, rows: int) -> int:
        """Pages that hold `rows` rows."""
        return -(-rows // self.page_size)

    def take(self, count: int) -> list[int]:
        """`count` pages for a new owner. Raises ValueError if there are not so many."""
        if count > len(self._free):
            raise ValueError(f"{count} pages asked for, {len(self._free)} of {self.num_pages} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._owned[page] = True
        return taken

    def give_back(self, pages: list[int]) -> None:
        """The owner is done with these pages. Raises ValueError for a page that nobody owns."""
        for page in pages:
            if not 0 <= page < self.num_pages or not self._owned[page]:
                raise ValueError(f"page {page} is given back, but nobody owns it: it would be handed out twice")
            self._owned[page] = False
            self._free.append(page)
