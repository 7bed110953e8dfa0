#!/bin/bash
# A throw-away Debian whose PID 1 is systemd, in a container of this machine: real units, D-Bus, sd_notify, watchdog
# and journald at native speed, and CPU quotas (cgroup v1) that the kernel of this machine enforces.
#
#   nspawn.sh deps                          install what is needed here (apt)
#   nspawn.sh build                         make the root file system once and print its path
#   nspawn.sh run [-i DIR] [-o DIR] [-t SEC] -- CMD [ARG...]
#       boots a fresh copy, runs CMD in it as root and prints what CMD prints.
#       -i DIR   is /in in the guest, read-only          -o DIR   is /out in the guest, writable
#       -t SEC   ends everything after SEC seconds (120)
#       exit code: CMD's; 124 after SEC seconds; 125 when the guest did not come up
#   nspawn.sh sweep                         remove what killed runs left behind (run does it too)
#
# Root only; needs the v1 hierarchies cpu and cpuacct mounted apart. The guest has no network.
# MACHINE_SUITE (bookworm) and MACHINE_PACKAGES (more Debian packages, separated by blanks) choose another guest; each
# choice is cached by its hash in ${XDG_CACHE_HOME:-~/.cache}/cpumond-machine.
set -euo pipefail
shopt -s inherit_errexit

suite=${MACHINE_SUITE:-bookworm}
# One root for all tests that need no more than this: making one takes longer than most of them.
packages="systemd systemd-sysv dbus polkitd procps python3 python3-venv ${MACHINE_PACKAGES:-}"
cache=${XDG_CACHE_HOME:-$HOME/.cache}/cpumond-machine
cgroups=/sys/fs/cgroup
hierarchies=(cpu cpuacct memory pids systemd unified)
prefix=cpumond-machine

say() { echo "nspawn.sh: $*" >&2; }
fail() { say "$@"; exit 125; }

deps() {
    if type systemd-nspawn mmdebstrap >/dev/null 2>&1; then return; fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -qq -y --no-install-recommends systemd-container mmdebstrap >/dev/null
}

# ---- the root file system ------------------------------------------------------------------------------------------

# PID 1 until systemd takes over. systemd-nspawn mounts the v1 controllers read-only, and systemd looks only once, at
# its start, which of them it may use: so they become writable before it starts.
guest_init() {
    cat <<'GUEST'
#!/bin/sh
for controller in cpu cpuacct; do mount -o remount,bind,rw /sys/fs/cgroup/$controller; done
exec /lib/systemd/systemd "$@"
GUEST
}

# Runs the command once the boot is over, leaves its exit code, and switches the guest off.
guest_runner() {
    cat <<'GUEST'
#!/bin/bash
systemctl is-system-running --wait >/run/boot-state
cd /
(set +e; eval "$(cat /machine/command)") </dev/null >/machine/log 2>&1
echo $? >/machine/status
systemctl poweroff --force --force
GUEST
}

guest_unit() {
    cat <<'GUEST'
[Unit]
Description=Run the command of nspawn.sh
After=basic.target dbus.service

[Service]
# exec, not oneshot: the boot must not wait for the command, which waits for the boot.
Type=exec
Environment=HOME=/root LANG=C.UTF-8
ExecStart=/usr/local/sbin/machine-runner

[Install]
WantedBy=multi-user.target
GUEST
}

fill_root() { # fill_root DIR
    local sources=() file
    for file in /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list; do
        # This machine's own sources know the nearest mirror; they fit when they name the wanted release.
        if grep -qsw "$suite" "$file"; then sources=("$file"); break; fi
    done
    # shellcheck disable=SC2086  # the list of packages is split on purpose
    mmdebstrap --quiet --variant=minbase --include="$(printf '%s,' $packages)" "$suite" "$1" "${sources[@]}"
    guest_init >"$1/usr/local/sbin/machine-init"
    guest_runner >"$1/usr/local/sbin/machine-runner"
    chmod 755 "$1/usr/local/sbin/machine-init" "$1/usr/local/sbin/machine-runner"
    guest_unit >"$1/etc/systemd/system/machine-runner.service"
    chroot "$1" systemctl --quiet enable machine-runner.service
    # Timers for months of running; a guest lives for seconds.
    chroot "$1" systemctl --quiet mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer \
        e2scrub_all.timer fstrim.timer systemd-tmpfiles-clean.timer
    mkdir "$1/in" "$1/out" "$1/machine"
}

root_path() {
    local recipe
    recipe=$(declare -f guest_init guest_runner guest_unit fill_root; echo "$suite $packages")
    echo "$cache/root-$(sha256sum <<<"$recipe" | cut -c1-16)"
}

build() {
    local root; root=$(root_path)
    if [ -d "$root" ]; then echo "$root"; return; fi
    type mmdebstrap >/dev/null 2>&1 || fail "mmdebstrap is missing; $0 deps installs it"
    mkdir -p "$cache"
    (   # Two test runs at once build one root between them.
        flock 9
        [ -d "$root" ] && exit
        rm -rf "$root.part"
        fill_root "$root.part"
        mv "$root.part" "$root"
    ) 9>"$cache/lock" >&2
    echo "$root"
}

# ---- one run -------------------------------------------------------------------------------------------------------

# Ends what still runs in the cgroups NAME and removes them. A process needs a moment to leave its cgroup.
remove_cgroups() { # remove_cgroups NAME
    local hierarchy path pid tries
    for hierarchy in "${hierarchies[@]}"; do
        path=$cgroups/$hierarchy/$1
        for ((tries = 0; tries < 100; tries++)); do
            [ -d "$path" ] || break
            while read -r pid; do
                # 0 is a process of a foreign pid namespace; `kill 0` would hit ourselves.
                [ "$pid" = 0 ] || kill -KILL "$pid" 2>/dev/null || true
            done < <(find "$path" -name cgroup.procs -exec cat {} + 2>/dev/null)
            find "$path" -depth -type d -exec rmdir {} + 2>/dev/null || true
            [ -d "$path" ] && sleep 0.05
        done
        [ ! -d "$path" ] || say "could not remove $path"
    done
}

# A run that was killed with SIGKILL could not tidy up; what it left bears the number of its process.
sweep() {
    local path
    for path in "$cgroups/systemd/$prefix".* "${TMPDIR:-/tmp}/$prefix".*; do
        if [ -d "$path" ] && ! kill -0 "${path##*.}" 2>/dev/null; then
            remove_cgroups "${path##*/}"
            case $path in "$cgroups"/*) ;; *) rm -rf "$path" ;; esac
        fi
    done
}

tidy_up() {
    local pid
    set +e
    trap '' INT TERM HUP PIPE
    {   # without the shell's own words about killed jobs
        for pid in $guest_pid $timer_pid; do kill -KILL "$pid"; done
        wait
    } 2>/dev/null || true
    remove_cgroups "$name"
    rm -rf "$work"
}

run() {
    local seconds=120 in='' out='' option root binds=() code=0 hierarchy
    while getopts i:o:t: option; do
        case $option in
        i) in=$(realpath "$OPTARG") ;;
        o) mkdir -p "$OPTARG"; out=$(realpath "$OPTARG") ;;
        t) seconds=$OPTARG ;;
        *) exit 64 ;;
        esac
    done
    shift $((OPTIND - 1))
    [ "${1:-}" != -- ] || shift
    [ $# -gt 0 ] || { say "run: what command?"; exit 64; }
    [ "$(id -u)" = 0 ] || fail "only root can boot a guest"
    type systemd-nspawn >/dev/null 2>&1 || fail "systemd-nspawn is missing; $0 deps installs it"
    for hierarchy in "${hierarchies[@]}"; do
        mountpoint -q "$cgroups/$hierarchy" || fail "$cgroups/$hierarchy is not mounted; v1 controllers are needed"
    done
    root=$(build)
    sweep

    name=$prefix.$$
    guest_pid='' timer_pid=''
    work=${TMPDIR:-/tmp}/$name
    mkdir -m 700 "$work"
    trap tidy_up EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP PIPE
    printf '%q ' "$@" >"$work/command"
    [ -z "$in" ] || binds+=("--bind-ro=$in:/in")
    [ -z "$out" ] || binds+=("--bind=$out:/out")
    for hierarchy in "${hierarchies[@]}"; do mkdir "$cgroups/$hierarchy/$name"; done
    # What happens in the guest is judged by the time it takes: it comes before the other work of this machine.
    echo 262144 >"$cgroups/cpu/$name/cpu.shares"

    # The launcher goes into the cgroups; the guest inherits them and sees them as its roots. It is a process of its
    # own in the background, so that a signal to this script is handled at once and not after the guest's end.
    (
        trap - EXIT INT TERM HUP PIPE
        for hierarchy in "${hierarchies[@]}"; do echo "$BASHPID" >"$cgroups/$hierarchy/$name/cgroup.procs"; done
        exec systemd-nspawn --quiet --register=no --keep-unit --machine="$prefix-$$" --directory="$root" \
            --volatile=overlay --private-network --kill-signal=SIGRTMIN+3 --bind="$work:/machine" "${binds[@]}" \
            /usr/local/sbin/machine-init
    ) </dev/null >"$work/console" 2>&1 &
    guest_pid=$!
    sleep "$seconds" &
    timer_pid=$!
    wait -n "$guest_pid" "$timer_pid" || true
    if ! kill -0 "$timer_pid" 2>/dev/null; then code=124; say "not done after $seconds s"; fi
    [ ! -e "$work/log" ] || cat "$work/log"
    [ ! -s "$work/status" ] || exit "$(cat "$work/status")"
    if [ "$code" = 0 ]; then code=125; say "the guest ended early"; fi
    tail -n 40 "$work/console" >&2
    exit "$code"
}

case ${1:-} in
deps | build | run | sweep) "$@" ;;
*) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 64 ;;
esac
