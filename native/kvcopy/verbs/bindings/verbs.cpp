// Python's side: millrace_native.verbs. Errors arrive as millrace_native.verbs.VerbsError.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "device.hpp"
#include "queue_pair.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace millrace::verbs;

namespace {

using Offsets = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::bytes as_bytes(const Gid& gid) { return nb::bytes(gid.data(), gid.size()); }

Address address_of(uint32_t number, uint32_t sequence, uint16_t lid, const nb::bytes& gid, uint8_t mtu, uint8_t reads) {
    Address address{number, sequence, lid, {}, mtu, reads};
    if (gid.size() != address.gid.size()) throw nb::value_error("a GID has 16 bytes");
    if (mtu < IBV_MTU_256 || mtu > IBV_MTU_4096) throw nb::value_error("mtu is not one of ibv_mtu");
    const auto* raw = static_cast<const uint8_t*>(gid.data());
    std::copy(raw, raw + address.gid.size(), address.gid.begin());
    return address;
}

std::span<const int64_t> from(const Offsets& array, size_t first) {
    return {array.data() + first, array.size() - first};
}

size_t post(QueuePair& pair, const Offsets& source, const Offsets& target, const Offsets& lengths, size_t first,
            uint32_t remote_key) {
    if (source.size() != lengths.size() || target.size() != lengths.size() || first > lengths.size()) {
        throw nb::value_error("the arrays differ in length, or first is beyond them");
    }
    return pair.post(from(source, first), from(target, first), from(lengths, first), remote_key);
}

}  // namespace

NB_MODULE(verbs, m) {
    nb::exception<VerbsError>(m, "VerbsError");
    m.attr("INTERFACE") = 1;
    m.def("usable_devices", &usable_devices);
    nb::class_<Device>(m, "Device")
        .def(nb::init<const std::string&, int>(), "name"_a, "gid_index"_a = -1)
        .def_prop_ro("gid", [](const Device& device) { return as_bytes(device.gid()); })
        .def_prop_ro("message_bytes_max", &Device::message_bytes_max);
    nb::class_<Region>(m, "Region")
        .def(nb::init<std::shared_ptr<Device>, uint64_t, uint64_t>(), "device"_a, "address"_a, "size"_a)
        .def(nb::init<std::shared_ptr<Device>, uint64_t, uint64_t, int, uint64_t>(), "device"_a, "address"_a, "size"_a,
             "dmabuf"_a, "offset"_a)
        .def_prop_ro("remote_key", &Region::remote_key)
        .def("close", &Region::close);
    nb::class_<QueuePair>(m, "QueuePair")
        .def(nb::init<std::shared_ptr<Device>, std::shared_ptr<Region>, bool, uint32_t>(), "device"_a, "region"_a,
             "asks"_a, "depth"_a)
        .def("address",
             [](const QueuePair& pair) {
                 const Address own = pair.address();
                 return nb::make_tuple(own.number, own.sequence, own.lid, as_bytes(own.gid), own.mtu, own.reads);
             })
        .def(
            "connect",
            [](QueuePair& pair, uint32_t number, uint32_t sequence, uint16_t lid, const nb::bytes& gid, uint8_t mtu,
               uint8_t reads,
               uint8_t timeout) { pair.connect(address_of(number, sequence, lid, gid, mtu, reads), timeout); },
            "number"_a, "sequence"_a, "lid"_a, "gid"_a, "mtu"_a, "reads"_a, nb::kw_only(), "timeout"_a)
        .def("post", &post, "source"_a, "target"_a, "lengths"_a, "first"_a, "remote_key"_a)
        .def("poll", &QueuePair::poll)
        .def("close", &QueuePair::close)
        .def_prop_ro("posted", &QueuePair::posted)
        .def_prop_ro("completed", &QueuePair::completed);
}
