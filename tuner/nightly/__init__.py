"""Every night: the incumbent against the nights before it, a search where better is likely, and who must be told."""

from tuner.nightly.hooks import Told
from tuner.nightly.night import Nightly, Outcome, exit_state
from tuner.nightly.profile import Profile, check_variables, load_profile
from tuner.nightly.ready import Ready, ready
from tuner.nightly.record import Event, History, Night, State
from tuner.nightly.report import junit, markdown

__all__ = [
    "Event",
    "History",
    "Night",
    "Nightly",
    "Outcome",
    "Profile",
    "Ready",
    "State",
    "Told",
    "check_variables",
    "exit_state",
    "junit",
    "load_profile",
    "markdown",
    "ready",
]
