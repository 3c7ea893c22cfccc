"""What a run is: typed options, their flags and YAML, the rules they obey and the arithmetic that follows from them.

Never imports torch, so that a mistake is told before torch has been loaded and a run can be planned without it.
"""
