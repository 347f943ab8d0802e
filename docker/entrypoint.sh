#!/bin/sh
# Starts what it is given as process 1's child, with the right to open ports below 1024 where the container has it.
#
# Docker lets every user open them. Elsewhere (podman, Kubernetes) the capability NET_BIND_SERVICE does it, which a process
# that is not root gets only from a file that carries it: bind-low-ports is setpriv with that one capability. Where
# the container was not given the capability, or must not gain any, that file does not run, and nothing is lost.
bind='/usr/local/bin/bind-low-ports --inh-caps +net_bind_service --ambient-caps +net_bind_service'
if $bind true 2>/dev/null; then exec tini -- $bind "$@"; fi
exec tini -- "$@"
