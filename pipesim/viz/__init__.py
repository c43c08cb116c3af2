"""Views of a run and of a schedule.

``scene`` turns a timeline into the columns of its bars, ``lanes`` adds those of communication, and ``palette`` gives every kind
of op its colour; the others draw them: ``text`` (a terminal), ``svg`` (Jupyter, no dependency), ``mpl`` (papers), ``interactive`` (a browser) and ``trace``
(Perfetto). Nothing here is imported before it is used.
"""
