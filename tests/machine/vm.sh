#!/bin/bash
# A throw-away Debian of its own under qemu: its own kernel, so any cgroup layout, whatever this machine has mounted.
# The processor is emulated, ten to twenty times slower than this machine: a KVM that is there need not work.
#
#   vm.sh deps                              install what is needed here (apt)
#   vm.sh build                             make the disk image once and print where it is
#   vm.sh run [-c LAYOUT] [-i DIR] [-o DIR] [-t SEC] [-m MIB] [-s CPUS] -- CMD [ARG...]
#       boots a fresh copy, runs CMD in it as root and prints what CMD prints.
#       -c LAYOUT  of its cgroups: v2 (default), v1, hybrid
#       -i DIR     is /in in the guest, read-only      -o DIR     takes what the guest left in /out
#       -t SEC     ends everything after SEC seconds (300)
#       -m MIB     memory (1536)                       -s CPUS    processors (2)
#       exit code: CMD's; 124 after SEC seconds; 125 when the guest ended early or showed no life, twice
#       A CMD that has written "reboot" into /machine/again is run again after a reboot of the guest, with its disks as
#       they were left; with "cut" instead, the guest is not shut down before that.
#       A guest that ends early, or whose console is silent for two minutes (MACHINE_SILENCE, in seconds), is booted
#       once more and CMD is run again: /out is as it was left, and the system is a fresh copy unless a reboot was due.
#   vm.sh sweep                             remove what killed runs left behind (run does it too)
#
# Root only. The guest has no network. MACHINE_SUITE (bookworm) and MACHINE_PACKAGES (more Debian packages, separated by
# blanks) choose another guest; each choice is cached by its hash in ${XDG_CACHE_HOME:-~/.cache}/cpumond-machine.
# MACHINE_ACCELERATOR=kvm where it works. MACHINE_IMAGE=DIR is an image that is there already.
set -euo pipefail
shopt -s inherit_errexit

suite=${MACHINE_SUITE:-bookworm}
packages="systemd systemd-sysv dbus polkitd udev kmod procps python3 linux-image-cloud-amd64 klibc-utils cpio"
# Engines of containers and Slurm: only tests start them.
engines="docker.io podman crun slurmctld slurmd slurm-client munge busybox-static"
packages="$packages $engines ${MACHINE_PACKAGES:-}"
cache=${XDG_CACHE_HOME:-$HOME/.cache}/cpumond-machine
prefix=cpumond-vm
accelerator=${MACHINE_ACCELERATOR:-tcg,thread=multi}
silence=${MACHINE_SILENCE:-120}

say() { echo "vm.sh: $*" >&2; }
fail() { say "$@"; exit 125; }
require() { # require PROGRAM...
    local program
    for program; do type "$program" >/dev/null 2>&1 || fail "$program is missing; $0 deps installs it"; done
}

deps() {
    if type qemu-system-x86_64 mmdebstrap mke2fs debugfs zstd >/dev/null 2>&1; then return; fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -qq -y --no-install-recommends qemu-system-x86 mmdebstrap e2fsprogs zstd >/dev/null
}

# ---- the disk image ------------------------------------------------------------------------------------------------

# No daemon starts while packages are installed.
prepare_root() { # prepare_root DIR
    printf '#!/bin/sh\nexit 101\n' >"$1/usr/sbin/policy-rc.d"
    chmod 755 "$1/usr/sbin/policy-rc.d"
}

# Runs the command once the boot is over, leaves its exit code, and switches the guest off, or boots it again. The disk
# with the command and its results is written through, so that they are there even when the guest is killed. Every few
# seconds the console gets a sign of life; before and after, it has what the kernel and systemd print there.
guest_runner() {
    cat <<'GUEST'
#!/bin/bash
while echo alive; do sleep 5; done >/dev/ttyS0 &
mount -o sync /dev/vdb /machine
mount --bind /machine/out /out
[ ! -e /dev/vdc ] || mount -o ro,noload /dev/vdc /in
systemctl is-system-running --wait >/run/boot-state
touch /machine/began
cd /
stty -F /dev/ttyS1 raw -echo
(set +e; eval "$(cat /machine/command)") </dev/null >/dev/ttyS1 2>&1
status=$?
if [ -e /machine/again ]; then
    [ "$(cat /machine/again)" != cut ] || echo b >/proc/sysrq-trigger
    systemctl reboot
    exit
fi
echo $status >/machine/status
sync
systemctl poweroff --force --force
GUEST
}

guest_unit() {
    cat <<'GUEST'
[Unit]
Description=Run the command of vm.sh
After=basic.target dbus.service

[Service]
# exec, not oneshot: the boot must not wait for the command, which waits for the boot.
Type=exec
Environment=HOME=/root LANG=C.UTF-8
ExecStart=/usr/local/sbin/machine-runner
# Keeps every controller switched on at the root, where the command makes cgroups of its own.
Delegate=yes

[Install]
WantedBy=multi-user.target
GUEST
}

fill_root() { # fill_root DIR HOOK
    local sources=() file
    for file in /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list; do
        # This machine's own sources know the nearest mirror; they fit when they name the wanted release.
        if grep -qsw "$suite" "$file"; then sources=("$file"); break; fi
    done
    # shellcheck disable=SC2016  # "$1" is for the shell that runs it
    { declare -f prepare_root; echo 'prepare_root "$1"'; } >"$2"
    # INITRD=No is for the kernel's package; see make_initrd.
    # shellcheck disable=SC2086  # the list of packages is split on purpose
    INITRD=No mmdebstrap --quiet --variant=minbase --include="$(printf '%s,' $packages)" \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        --essential-hook="bash $2 \"\$1\"" "$suite" "$1" "${sources[@]}"
    guest_runner >"$1/usr/local/sbin/machine-runner"
    chmod 755 "$1/usr/local/sbin/machine-runner"
    guest_unit >"$1/etc/systemd/system/machine-runner.service"
    chroot "$1" systemctl --quiet enable machine-runner.service
    # Only tests start an engine; what packages enable is all that starts at the boot.
    chroot "$1" sh -c 'systemctl --quiet disable docker.service docker.socket containerd.service munge.service \
        slurmd.service slurmctld.service podman.service podman.socket podman-restart.service \
        podman-auto-update.service podman-auto-update.timer'
    # Timers for months of running, what only people and log books need, and what looks for devices that this machine
    # does not have: a guest lives for minutes, and its processor is slow.
    chroot "$1" systemctl --quiet mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer \
        e2scrub_all.timer e2scrub_reap.service fstrim.timer systemd-tmpfiles-clean.timer \
        getty@tty1.service serial-getty@ttyS0.service systemd-update-utmp.service systemd-random-seed.service \
        systemd-update-utmp-runlevel.service systemd-user-sessions.service systemd-logind.service \
        systemd-ask-password-console.path systemd-ask-password-wall.path systemd-initctl.socket \
        systemd-udevd.service systemd-udevd-control.socket systemd-udevd-kernel.socket systemd-udev-trigger.service \
        modprobe@.service kmod-static-nodes.service systemd-modules-load.service systemd-tmpfiles-setup-dev.service \
        systemd-binfmt.service proc-sys-fs-binfmt_misc.automount systemd-pstore.service systemd-remount-fs.service \
        dev-hugepages.mount dev-mqueue.mount sys-fs-fuse-connections.mount sys-kernel-config.mount \
        sys-kernel-debug.mount sys-kernel-tracing.mount
    # They run at the boot and at each `systemctl daemon-reload`, and have nothing to do here.
    mkdir -p "$1/etc/systemd/system-generators"
    for file in "$1"/usr/lib/systemd/system-generators/*; do
        ln -s /dev/null "$1/etc/systemd/system-generators/${file##*/}"
    done
    chroot "$1" systemctl --quiet set-default multi-user.target
    touch "$1/etc/.updated" "$1/var/.updated"  # what follows an update of /usr was done by the packages
    # A machine that knows its id does not stop for what belongs to a first boot.
    tr -d - </proc/sys/kernel/random/uuid >"$1/etc/machine-id"
    echo machine >"$1/etc/hostname"
    printf '127.0.0.1 localhost machine\n' >"$1/etc/hosts"
    rm -f "$1/usr/sbin/policy-rc.d"
    mkdir "$1/in" "$1/out" "$1/machine"
}

# What loads the drivers of the disks and begins: Debian's own looks for much more, for seconds of this processor.
make_initrd() { # make_initrd ROOT
    local folder=$1/tmp/initrd name
    mkdir -p "$folder/bin" "$folder/lib" "$folder/dev" "$folder/root"
    for name in sh mount insmod run-init; do cp "$1/usr/lib/klibc/bin/$name" "$folder/bin/"; done
    cp "$1"/usr/lib/klibc-*.so "$folder/lib/"  # Debian 12's programs look for it there, Debian 13's in /usr/lib
    mkdir "$folder/usr"
    ln -s ../lib "$folder/usr/lib"
    echo '#!/bin/sh' >"$folder/init"
    for name in virtio/virtio_ring virtio/virtio virtio/virtio_pci_legacy_dev virtio/virtio_pci_modern_dev \
        virtio/virtio_pci block/virtio_blk; do
        # Some are in the kernel of Debian 13, the others are compressed, which klibc's insmod does not read.
        grep -q "/$name.ko\$" "$1"/usr/lib/modules/*/modules.builtin && continue
        cp "$1"/usr/lib/modules/*/kernel/drivers/$name.ko* "$folder/"
        [ ! -e "$folder/${name#*/}.ko.xz" ] || unxz "$folder/${name#*/}.ko.xz"
        echo "insmod /${name#*/}.ko" >>"$folder/init"
    done
    cat >>"$folder/init" <<'INIT'
mount -t devtmpfs dev /dev
mount -t ext4 /dev/vda /root
mount -t devtmpfs dev /root/dev
exec run-init /root /sbin/init "$@"
INIT
    chmod 755 "$folder/init"
    chroot "$1" sh -c 'cd /tmp/initrd && find . | cpio --quiet -o -H newc'
    rm -rf "$folder"
}

make_image() { # make_image DIR
    mkdir -p "$1"
    fill_root "$1/root" "$1/hook"
    cp "$1"/root/boot/vmlinuz-* "$1/vmlinuz"
    make_initrd "$1/root" >"$1/initrd"
    rm -rf "$1"/root/boot/* "$1"/root/var/cache/apt/*
    mke2fs -q -F -t ext4 -O ^has_journal -d "$1/root" "$1/disk" "$(($(du -sm "$1/root" | cut -f1) + 2048))M"
    rm -rf "$1/root" "$1/hook"
}

image_path() {
    local recipe
    if [ -n "${MACHINE_IMAGE:-}" ]; then echo "$MACHINE_IMAGE"; return; fi
    recipe=$(declare -f prepare_root guest_runner guest_unit fill_root make_initrd make_image; echo "$suite $packages")
    echo "$cache/vm-$(sha256sum <<<"$recipe" | cut -c1-16)"
}

build() {
    local image; image=$(image_path)
    if [ -d "$image" ]; then echo "$image"; return; fi
    [ "$(id -u)" = 0 ] || fail "only root can make the image"
    require mmdebstrap mke2fs zstd
    mkdir -p "$cache"
    (   # Two test runs at once build one image between them.
        flock 9
        [ -d "$image" ] && exit
        rm -rf "$image.part"
        make_image "$image.part"
        mv "$image.part" "$image"
    ) 9>"$cache/lock-vm" >&2
    echo "$image"
}

# ---- one run -------------------------------------------------------------------------------------------------------

# A run that was killed with SIGKILL could not tidy up; what it left bears the number of its process.
sweep() {
    local path
    for path in "${TMPDIR:-/tmp}/$prefix".*; do
        if [ -d "$path" ] && ! kill -0 "${path##*.}" 2>/dev/null; then rm -rf "$path"; fi
    done
}

tidy_up() {
    local pid
    set +e
    trap '' INT TERM HUP PIPE
    {   # without the shell's own words about killed jobs
        for pid in $guest_pid $timer_pid $life_pid; do kill -KILL "$pid"; done
        wait
    } 2>/dev/null || true
    rm -rf "$work"
}

copy_root() { cp --sparse=always "$image/disk" "$work/root"; }

read_machine() { # read_machine FILE: what the guest has left
    debugfs -R "cat $1" "$work/disk" 2>/dev/null
}

has_begun() { debugfs -R "stat began" "$work/disk" 2>/dev/null | grep -q Inode; }

forget_boot() {
    e2fsck -fy "$work/disk" >/dev/null 2>&1 || true
    debugfs -w -f /dev/stdin "$work/disk" <<<$'rm again\nrm began' >/dev/null 2>&1
}

show_console() { grep -av '^alive' "$work/console" | tail -n "$1" >&2; } # show_console LINES

# Ends when the console has not grown for so long.
watch_life() {
    local size='' before since=$SECONDS
    while [ $((SECONDS - since)) -lt "$silence" ]; do
        sleep 1
        before=$size size=$(stat -c %s "$work/console" 2>/dev/null || true)
        [ "$size" = "$before" ] || since=$SECONDS
    done
}

# One boot: 0 when the guest switched itself off, or ended otherwise; 1 when the time is over, 2 when it showed no life.
boot() { # boot KERNEL_ARGUMENT...
    local code=0 disks=(-drive "file=$work/root,if=virtio,format=raw,cache=unsafe"
        -drive "file=$work/disk,if=virtio,format=raw,cache=unsafe")
    [ -z "$in" ] || disks+=(-drive "file=$work/in,if=virtio,format=raw,cache=unsafe,readonly=on")
    # The guest ends with this script, even when that is killed. Nehalem is the least processor that wheels for
    # x86-64-v2 run on. no_timer_check: the kernel panics where its timer's first ticks come late. What waits for this
    # machine's other work counts as CPU time in the guest, so it comes before that, where this is allowed.
    nice -n -10 setpriv --pdeathsig KILL qemu-system-x86_64 -machine q35 -accel "$accelerator" -cpu Nehalem,+rdrand \
        -smp "$cpus" -m "$memory" -display none -nodefaults -no-reboot -nic none \
        -serial "file:$work/console" -chardev stdio,id=output,signal=off -serial chardev:output \
        -kernel "$image/vmlinuz" -initrd "$image/initrd" "${disks[@]}" \
        -append "console=ttyS0 panic=-1 mitigations=off audit=0 apparmor=0 nokaslr
 cryptomgr.notests no_timer_check tsc=reliable psi=1 $*" </dev/null 2>"$work/qemu" &
    guest_pid=$!
    watch_life &
    life_pid=$!
    wait -n "$guest_pid" "$timer_pid" "$life_pid" || true
    if ! kill -0 "$timer_pid" 2>/dev/null; then code=1
    elif kill -0 "$guest_pid" 2>/dev/null; then code=2
    fi
    { kill -KILL "$guest_pid" "$life_pid"; wait "$guest_pid" "$life_pid"; } 2>/dev/null || true
    guest_pid='' life_pid=''
    return $code
}

run() {
    local seconds=300 layout=v2 memory=1536 cpus=2 in='' out='' option image arguments code due='' died='' status=''
    while getopts c:i:o:t:m:s: option; do
        case $option in
        c) layout=$OPTARG ;;
        i) in=$(realpath "$OPTARG") ;;
        o) mkdir -p "$OPTARG"; out=$(realpath "$OPTARG") ;;
        t) seconds=$OPTARG ;;
        m) memory=$OPTARG ;;
        s) cpus=$OPTARG ;;
        *) exit 64 ;;
        esac
    done
    shift $((OPTIND - 1))
    [ "${1:-}" != -- ] || shift
    [ $# -gt 0 ] || { say "run: what command?"; exit 64; }
    arguments=systemd.unified_cgroup_hierarchy=0
    case $layout in
    v2) arguments=systemd.unified_cgroup_hierarchy=1 ;;
    v1) arguments+=" systemd.legacy_systemd_cgroup_controller=1" ;;
    hybrid) arguments+=" systemd.legacy_systemd_cgroup_controller=0" ;;
    *) say "run: there is no layout '$layout'; v2, v1 or hybrid"; exit 64 ;;
    esac
    require qemu-system-x86_64 mke2fs e2fsck debugfs setpriv
    image=$(build)
    sweep

    guest_pid='' timer_pid='' life_pid=''
    work=${TMPDIR:-/tmp}/$prefix.$$
    mkdir -m 700 "$work" "$work/files"
    trap tidy_up EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP PIPE
    printf '%q ' "$@" >"$work/files/command"
    [ -z "$in" ] || mke2fs -q -F -t ext4 -O ^has_journal -d "$in" "$work/in" "$(($(du -sm "$in" | cut -f1) * 2 + 64))M" >/dev/null
    sleep "$seconds" &
    timer_pid=$!
    mkdir -p "$work/files/out"
    mke2fs -q -F -t ext4 -O ^has_journal -d "$work/files" "$work/disk" 1024M >/dev/null
    copy_root
    while :; do
        code=0
        boot "$arguments" || code=$?
        [ $code != 1 ] || { say "not done after $seconds s"; break; }
        status=$(read_machine status)
        [ -z "$status" ] || break
        if [ -n "$(read_machine again)" ]; then
            due=yes
        else
            # An emulated machine dies or stands still now and then, mostly while it boots.
            case $code in 0) say "the guest ended early" ;; *) say "the guest showed no life for $silence s" ;; esac
            [ -z "$died" ] || break
            died=yes
            show_console 20
            say "it is booted once more"
            if [ -n "$due" ] && ! has_begun; then e2fsck -fy "$work/root" >/dev/null 2>&1 || true
            else due='' && copy_root
            fi
        fi
        forget_boot
    done
    if [ -n "$out" ]; then
        mkdir "$work/back"
        debugfs -R "rdump out $work/back" "$work/disk" 2>/dev/null
        cp -a "$work/back/out/." "$out/"
    fi
    [ -z "$status" ] || exit "$status"
    cat "$work/qemu" >&2
    show_console 40
    kill -0 "$timer_pid" 2>/dev/null && exit 125
    exit 124
}

case ${1:-} in
deps | build | run | sweep) "$@" ;;
*) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 64 ;;
esac
