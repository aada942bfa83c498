"""Workers on a Ray cluster: worker groups of actors, and samplers that scale.

Nothing outside this package imports Ray. Not responsible for starting or joining a cluster: whoever makes a group has
called `ray.init` before.
"""
