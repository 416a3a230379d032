#!/bin/sh
# Install those of these Debian packages that are missing, as root, and start and enable none of their services: Prometheus's and
# Alertmanager's take the ports of docker-compose.yml. What is already installed stays as it is.
set -eu
missing=
for package; do
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
policy=/usr/sbin/policy-rc.d # Debian asks it before it starts a service; a machine with a policy of its own keeps that
if [ ! -e "$policy" ]; then
  trap 'rm -f "$policy"' EXIT
  trap 'exit 130' INT TERM HUP
  printf '#!/bin/sh\ncase " %s " in *" ${1%%.service} "*) exit 101 ;; esac\n' "$missing" >"$policy"
  chmod +x "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -q >/dev/null
# shellcheck disable=SC2086 # a list of words
apt-get install -q -y --no-install-recommends --no-upgrade $missing >/dev/null
for package in $missing; do
  [ ! -e "/etc/init.d/$package" ] || update-rc.d "$package" disable
  [ ! -e "/lib/systemd/system/$package.service" ] || DPKG_MAINTSCRIPT_PACKAGE=$package deb-systemd-helper disable "$package.service" >/dev/null
done
