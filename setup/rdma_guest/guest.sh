#!/bin/busybox sh
# First process of the guest: makes a soft-RoCE device, runs what is in /command in the host's own file system
# (read-only), leaves its exit status in the shared folder, and powers off.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in $(cat /modules/order); do insmod "/modules/$module" || echo "guest: $module did not load"; done

mkdir -p /host /out
mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=1048576 host /host
mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576 out /out
for folder in proc sys dev; do mount -o bind "/$folder" "/host/$folder"; done
mount -t tmpfs tmp /host/tmp
mount -t tmpfs run /host/run
mkdir -p /host/dev/shm
mount -t tmpfs shm /host/dev/shm

hostname guest
ip link set lo up
ip addr add 192.0.2.15/24 dev eth0
ip link set eth0 up mtu 4200
chroot /host /bin/sh -c 'PATH=/usr/sbin:/usr/bin:/sbin:/bin; rdma link add rxe0 type rxe netdev eth0 && rdma link show'
# The GID of an address that was just given appears a moment later.
for _ in 1 2 3 4 5 6 7 8 9 10; do
  grep -q c000:020f /sys/class/infiniband/rxe0/ports/1/gids/* 2>/dev/null && break
  sleep 1
done

cp /command /host/tmp/command
chroot /host /bin/sh /tmp/command
echo $? > /out/status
sync
poweroff -f
