#!/usr/bin/env bash
# A CRIU that is new enough, in a folder of the project's; prints the path of its program. The system is not touched, but for Debian's signing keys where they are missing: the package client works on lists and a cache of its own, and CRIU runs with the C library that it was built for.
# A `criu` of 4.1 or newer that is installed already is used as it is. Debian 12 has 3.17, which is too old for its own newer kernels; Debian 13 has 4.1.
#   CRIU_SUITE=trixie   release of the distribution to take it from (Debian's mirror of this system is used)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

LEAST=4.1
SUITE=${CRIU_SUITE:-trixie}

# is_new_enough PROGRAM
is_new_enough() {
    local version
    version=$("$1" --version 2>/dev/null | sed -n 's/^Version: //p') || return 1
    [ -n "$version" ] && [ "$(printf '%s\n' "$LEAST" "$version" | sort -V | head -n 1)" = "$LEAST" ]
}

if installed=$(command -v criu) && is_new_enough "$installed"; then
    printf '%s\n' "$installed"
    exit
fi

HOME_OF_CRIU=$TARGET_DIR/criu-$SUITE
CRIU=$HOME_OF_CRIU/criu
if [ -x "$CRIU" ] && is_new_enough "$CRIU"; then
    printf '%s\n' "$CRIU"
    exit
fi

command -v apt-get >/dev/null || fail "no apt-get: install CRIU $LEAST or newer yourself"
# The mirror that this system uses for its own release, whatever form its list has.
MIRROR=$(apt-get indextargets --format '$(SITE) $(RELEASE) $(COMPONENT)' 2>/dev/null | awk '$3 == "main" && $2 !~ /-/ { print $1; exit }')
if [ -z "$MIRROR" ]; then
    MIRROR=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources 2>/dev/null | sed -nE 's/^(URIs:|deb) +(\[[^]]*\] +)?([^ ]*debian\/?)( .*)?$/\3/p' | head -n 1)
fi
[ -n "$MIRROR" ] || fail "no mirror of Debian in this system's package lists: install CRIU $LEAST or newer yourself"
KEYS=/usr/share/keyrings/debian-archive-keyring.gpg
[ -e "$KEYS" ] || apt_install debian-archive-keyring >&2

APT=$HOME_OF_CRIU/apt
rm -rf "$HOME_OF_CRIU"
mkdir -p "$APT/lists/partial" "$APT/cache/archives/partial" "$HOME_OF_CRIU/root"
: >"$APT/status"
printf 'deb [signed-by=%s] %s %s main\n' "$KEYS" "$MIRROR" "$SUITE" >"$APT/sources.list"
apt_private() {
    apt-get -q -q -o Dir::Etc::sourcelist="$APT/sources.list" -o Dir::Etc::sourceparts=- -o Dir::State::lists="$APT/lists" -o Dir::State::status="$APT/status" \
        -o Dir::Cache="$APT/cache" -o APT::Sandbox::User="$(id -un)" -o Debug::NoLocking=true "$@"
}
say "installing CRIU from $SUITE into $HOME_OF_CRIU" >&2
apt_private update >&2
apt_private install --download-only -y --no-install-recommends criu >&2
for package in "$APT"/cache/archives/*.deb; do
    dpkg-deb -x "$package" "$HOME_OF_CRIU/root"
done
rm -rf "$APT"

# What a program at work needs is left: 16 MB. The folder may be moved, and copied to another machine.
ROOT_OF_CRIU=$HOME_OF_CRIU/root
LOADER=$(cd "$ROOT_OF_CRIU" && find . -name 'ld-linux-*.so.*' -type f | head -n 1)
[ -n "$LOADER" ] || fail "the packages hold no C library: $ROOT_OF_CRIU"
LIBRARIES=$(dirname "$LOADER")
rm -rf "$ROOT_OF_CRIU/usr/share" "$ROOT_OF_CRIU/etc" "$ROOT_OF_CRIU/var" "$ROOT_OF_CRIU/$LIBRARIES/gconv"
cat >"$CRIU" <<END
#!/bin/sh
ROOT=\$(cd "\$(dirname "\$0")" && pwd)/root
exec "\$ROOT/$LOADER" --library-path "\$ROOT/$LIBRARIES" "\$ROOT/usr/sbin/criu" "\$@"
END
chmod +x "$CRIU"
is_new_enough "$CRIU" || fail "$SUITE has no CRIU $LEAST or newer: $("$CRIU" --version 2>&1 | head -n 1)"
printf '%s\n' "$CRIU"
